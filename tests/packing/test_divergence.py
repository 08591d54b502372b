"""The head's divergence from a teacher, in chunks, against whole distributions in float64."""

from functools import partial

import pytest
import torch
from torch import nn

from tiercel.algorithms.teacher import DIVERGENCES
from tiercel.packing.divergence import Target, TeacherTokens
from tiercel.packing.logprobs import LogitsTile, TokenHead
from tiercel.packing.pass_options import PassOptions

TOKENS, STATE, WORDS, TEACHER_STATE = 37, 12, 61, 20
MEASURES = [name for name, each in DIVERGENCES.items() if each.of is not None]
PLACEHOLDERS = (3, 50)


def heads(is_trained: bool, cap: float | None, teacher_words: int) -> tuple[TokenHead, TokenHead]:
    torch.manual_seed(0)
    linear, other = nn.Linear(STATE, WORDS, bias=False), nn.Linear(TEACHER_STATE, teacher_words, bias=False)
    linear.weight.requires_grad_(is_trained)
    other.weight.requires_grad_(False)
    head, teacher = TokenHead(linear, PLACEHOLDERS, cap), TokenHead(other, PLACEHOLDERS)
    head.tile = LogitsTile(tokens=8, words=16, logits=5 * WORDS)  # chunks of five tokens
    return head, teacher


def whole(head: TokenHead, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, words: int) -> torch.Tensor:
    """Logprobs of all words in float64."""
    logits = hidden @ weight.T
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    logits = (logits / temperature).index_fill(1, torch.tensor(PLACEHOLDERS), -1e30)
    return logits.log_softmax(-1)[:, :words].log_softmax(-1)


@pytest.mark.parametrize("top_k", (None, 7))
@pytest.mark.parametrize("is_trained", (False, True))
@pytest.mark.parametrize("name", MEASURES)
def test_value_and_gradient_are_those_of_whole_distributions(name, is_trained, top_k):
    for seed, cap, teacher_words in ((1, None, WORDS), (2, 3.0, WORDS), (3, None, WORDS + 8), (4, None, WORDS - 4)):
        head, teacher = heads(is_trained, cap, teacher_words)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(TOKENS, STATE, generator=generator).requires_grad_()
        states = torch.randn(TOKENS, TEACHER_STATE, generator=generator)
        weights = torch.rand(TOKENS, generator=generator)
        measure, words = partial(DIVERGENCES[name].of, mix=0.3), min(WORDS, teacher_words)

        weight64 = head.linear.weight.detach().double().requires_grad_()
        hidden64 = hidden.detach().double().requires_grad_()
        policy64 = whole(head, hidden64, weight64, 0.8, words if top_k is None else WORDS)
        teacher64 = whole(teacher, states.double(), teacher.linear.weight.double(), 0.8, words)
        if top_k is not None:
            values, places = teacher64.topk(top_k)
            told = TeacherTokens(drawn_N=torch.empty(len(places)), words_NK=places, logprobs_NK=values.float())
            policy64, teacher64 = (
                torch.cat([some, (1 - some.exp().sum(-1, keepdim=True)).log()], dim=1)
                for some in (policy64.gather(1, places), values)
            )
        else:
            told = TeacherTokens(drawn_N=torch.empty(len(states)), states_NH=states)
        expected = measure(policy64, teacher64)
        (expected * weights).sum().backward()

        target = Target(tokens=told, distribution=partial(teacher.distribution, temperature=0.8), measure=measure)
        found = head(
            hidden, torch.zeros(TOKENS, dtype=torch.int64), 0.8, options=PassOptions(target=target)
        ).divergence_N
        (found * weights).sum().backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        assert float((hidden.grad - hidden64.grad).norm() / hidden64.grad.norm()) < 1e-5
        if is_trained:
            assert float((head.linear.weight.grad - weight64.grad).norm() / weight64.grad.norm()) < 1e-5


def test_no_tokens_have_no_divergence():
    head, teacher = heads(False, None, WORDS)
    target = Target(
        tokens=TeacherTokens(drawn_N=torch.empty(0), states_NH=torch.empty(0, TEACHER_STATE)),
        distribution=partial(teacher.distribution, temperature=1.0),
        measure=partial(DIVERGENCES["reverse_kl"].of, mix=0.5),
    )
    scores = head(
        torch.empty(0, STATE, requires_grad=True),
        torch.empty(0, dtype=torch.int64),
        1.0,
        options=PassOptions(target=target),
    )
    assert scores.divergence_N is not None and scores.divergence_N.shape == (0,)
    scores.divergence_N.sum().backward()


def test_what_a_teacher_says_is_cut_and_joined():
    told = TeacherTokens(
        drawn_N=torch.arange(3.0), words_NK=torch.arange(6).view(3, 2), logprobs_NK=torch.arange(6.0).view(3, 2)
    )
    again = TeacherTokens.joined([told[0:1], told[1:3]])
    assert torch.equal(again.words_NK, told.words_NK) and torch.equal(again.logprobs_NK, told.logprobs_NK)
    assert again.states_NH is None and torch.equal(again.drawn_N, told.drawn_N)

"""The chunked head against a plain log-softmax and autograd in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiercel.models.layers import float32_scores
from tiercel.packing import logprobs as head_module
from tiercel.packing.logprobs import GPU_TILE, LogitsTile, TokenHead, _chunks
from tiercel.packing.pass_options import PassOptions

TOKENS, WIDTH, VOCABULARY = 11, 7, 23
PLACEHOLDERS = (2, 5, 99)  # the last is outside a padded head


def random_case(dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    linear.weight.data = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.tensor([0, 1, 3, 4, 6, 7, 8, 9, 22, 22, 0])
    return hidden, linear, targets


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the definition, in float64."""
    logits = hidden.double() @ weight.double().T
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    logits[:, [2, 5]] = -torch.inf
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
@pytest.mark.parametrize("chunk", (1, 3 * VOCABULARY + 5, TOKENS * VOCABULARY, 2**24))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("cap", (None, 3.0))
def test_values_and_gradients_equal_autograd(monkeypatch, dtype, is_trained, chunk, temperature, cap):
    tile = LogitsTile(tokens=1 + chunk % 7, words=1 + chunk % 10, logits=chunk)
    monkeypatch.setattr(head_module, "TILE", {"cpu": tile})
    hidden, linear, targets = random_case(dtype)
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    linear.requires_grad_(is_trained)
    hidden.requires_grad_()
    scores = TokenHead(linear, PLACEHOLDERS, cap)(hidden, targets, temperature)
    (scores.logprobs_N.exp() * weights).sum().backward()  # a loss that is not linear in the logprobs

    expected_hidden = hidden.detach().double().requires_grad_()
    expected_weight = linear.weight.detach().double().requires_grad_()
    logprobs, entropies = plain(expected_hidden, expected_weight, targets, temperature, cap)
    (logprobs.exp() * weights).sum().backward()

    close = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(scores.logprobs_N.double(), logprobs, **close)
    torch.testing.assert_close(scores.entropy_N.double(), entropies, **close)
    torch.testing.assert_close(hidden.grad.double(), expected_hidden.grad, **close)
    assert scores.logprobs_N.dtype == torch.float32 and hidden.grad.dtype == dtype
    assert not scores.entropy_N.requires_grad
    if is_trained:
        torch.testing.assert_close(linear.weight.grad.double(), expected_weight.grad, **close)
    else:
        assert linear.weight.grad is None


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_without_gradient_nothing_is_kept(is_trained):
    hidden, linear, targets = random_case(torch.float32)
    linear.requires_grad_(is_trained)
    with torch.no_grad():
        scores = TokenHead(linear, PLACEHOLDERS)(hidden, targets, 1.0)
    assert scores.logprobs_N.grad_fn is None
    torch.testing.assert_close(
        scores.logprobs_N.double(), plain(hidden, linear.weight.detach(), targets, 1.0)[0], rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_placeholders_have_no_probability(is_trained):
    hidden, linear, _ = random_case(torch.float32)
    linear.weight.data[2] = 50 * hidden[0]  # by far the likeliest if it were allowed
    linear.requires_grad_(is_trained)
    head = TokenHead(linear, PLACEHOLDERS)
    everywhere = torch.arange(VOCABULARY)
    logprobs = head(hidden[:1].expand(VOCABULARY, -1), everywhere, 1.0).logprobs_N.detach()
    assert logprobs.exp()[[2, 5]].tolist() == [0.0, 0.0]
    assert float(logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_a_uniform_distribution_by_hand(is_trained):
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
    nn.init.zeros_(linear.weight)
    linear.requires_grad_(is_trained)
    hidden = torch.ones(3, WIDTH, requires_grad=True)
    scores = TokenHead(linear, PLACEHOLDERS)(hidden, torch.tensor([0, 1, 22]), 0.5)
    torch.testing.assert_close(scores.logprobs_N.detach(), torch.full((3,), -math.log(21)))
    torch.testing.assert_close(scores.entropy_N, torch.full((3,), math.log(21)))


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_no_scored_tokens(is_trained):
    _, linear, targets = random_case(torch.float32)
    linear.requires_grad_(is_trained)
    hidden = torch.empty(0, WIDTH, requires_grad=True)
    scores = TokenHead(linear, PLACEHOLDERS)(hidden, targets[:0], 1.0)
    assert scores.logprobs_N.shape == scores.entropy_N.shape == (0,)
    scores.logprobs_N.sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
    if is_trained:
        assert float(linear.weight.grad.abs().sum()) == 0.0


def test_an_entropy_bonus_has_a_gradient():
    hidden, linear, targets = random_case(torch.float64)
    linear.requires_grad_(False)
    hidden.requires_grad_()
    scores = TokenHead(linear, PLACEHOLDERS)(hidden, targets, 0.7, options=PassOptions(entropy_gradient=True))
    (scores.logprobs_N + 0.3 * scores.entropy_N).sum().backward()
    same = hidden.detach().clone().requires_grad_()
    logprobs, entropies = plain(same, linear.weight, targets, 0.7)
    (logprobs + 0.3 * entropies).sum().backward()
    torch.testing.assert_close(hidden.grad, same.grad, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation inside makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
@pytest.mark.parametrize("cap", (None, 3.0))
@pytest.mark.parametrize("chunk", (1, 2**24))
def test_smoothed_logprobs_are_those_of_a_target_that_all_words_share(monkeypatch, is_trained, cap, chunk):
    """(1-e) log p plus e times the mean of log p over the words; placeholders are none."""
    monkeypatch.setattr(head_module, "TILE", {"cpu": LogitsTile(tokens=3, words=4, logits=chunk)})
    hidden, linear, targets = random_case(torch.float64)
    linear.requires_grad_(is_trained)
    hidden.requires_grad_()
    found_N = TokenHead(linear, PLACEHOLDERS, cap)(hidden, targets, 0.7, options=PassOptions(smoothing=0.1)).logprobs_N
    found_N.sum().backward()

    expected = hidden.detach().requires_grad_()
    words = [word for word in range(VOCABULARY) if word not in PLACEHOLDERS]
    logits = expected @ linear.weight.detach()[words].T
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7
    places = torch.tensor([words.index(target) for target in targets.tolist()])
    wanted = -torch.nn.functional.cross_entropy(logits, places, reduction="none", label_smoothing=0.1)
    wanted.sum().backward()
    assert torch.allclose(found_N.double(), wanted, rtol=1e-5, atol=2e-6)
    assert torch.allclose(hidden.grad, expected.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_squares_of_two_words_by_hand(monkeypatch, is_trained):
    """p = 1/4, 3/4: 1/16 + 9/16; a third word is a placeholder."""
    monkeypatch.setattr(head_module, "TILE", {"cpu": LogitsTile(tokens=1, words=1, logits=1)})
    linear = nn.Linear(1, 3, bias=False).requires_grad_(is_trained)
    linear.weight.data = torch.tensor([[0.0], [math.log(3)], [2.0]])
    head, hidden = TokenHead(linear, (2,)), torch.ones(2, 1, requires_grad=True)
    scores = head(hidden, torch.tensor([1, 0]), 1.0, options=PassOptions(squares=True))
    assert scores.squares_N.tolist() == pytest.approx([math.log(10 / 16)] * 2) and not scores.squares_N.requires_grad
    assert head(hidden, torch.tensor([1, 0]), 1.0).squares_N is None


def test_two_words_smoothed_by_hand():
    """Logits 0 and ln 3: p = 1/4, 3/4; of the second word 0.8 ln 3/4 + 0.2 (ln 1/4 + ln 3/4) / 2."""
    linear = nn.Linear(1, 2, bias=False)
    linear.weight.data = torch.tensor([[0.0], [math.log(3)]])
    scores = TokenHead(linear, ())(torch.ones(1, 1), torch.tensor([1]), 1.0, options=PassOptions(smoothing=0.2))
    assert scores.logprobs_N.item() == pytest.approx(0.9 * math.log(3 / 4) + 0.1 * math.log(1 / 4))


def test_logits_of_the_whole_batch_never_exist(monkeypatch):
    tokens, width, vocabulary = 300, 8, 2000
    linear = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    monkeypatch.setattr(head_module, "TILE", {"cpu": LogitsTile(tokens=50, words=200, logits=1)})
    with LargestTensor() as largest:
        scores = TokenHead(linear, ())(hidden, torch.zeros(tokens, dtype=torch.int64), 1.0)
        (kept,) = scores.logprobs_N.grad_fn.saved_tensors
        scores.logprobs_N.sum().backward()
    assert kept.shape == (tokens, width)
    assert largest.elements <= max(vocabulary * width, 50 * 200)


def test_chunks_hold_at_most_the_budget_and_at_least_a_token():
    assert _chunks(10, 8, 30) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert _chunks(2, 1000, 30) == [slice(0, 1), slice(1, 2)]
    assert _chunks(2, 8, 30) == [slice(0, 2)]
    assert _chunks(0, 8, 30) == [slice(0, 0)]


def test_a_trained_head_on_a_gpu_takes_a_few_chunks():
    assert len(_chunks(8192, 152064, GPU_TILE.logits)) == 5


@pytest.fixture
def wide_products(monkeypatch):
    """Gives this CPU the product that CUDA has: of tensors in half precision, in float32."""

    def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            return left.to(out_dtype) @ right.to(out_dtype)

    def product_into(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(product(left, right, out_dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", product, "CPU")
    library.impl("mm.dtype_out", product_into, "CPU")
    monkeypatch.setattr(float32_scores, "WIDE_DEVICES", {"cpu"})
    yield
    library._destroy()


@pytest.mark.parametrize("is_trained", (False, True), ids=("frozen", "trained"))
def test_logits_in_float32_are_not_rounded_to_half_precision(wide_products, is_trained):
    hidden, linear, targets = random_case(torch.bfloat16)
    linear.weight.data *= 8  # logits near 50, where bfloat16 has steps of 0.25
    linear.requires_grad_(is_trained)
    scores = TokenHead(linear, PLACEHOLDERS)(hidden.requires_grad_(), targets, 1.0)
    scores.logprobs_N.sum().backward()
    same_hidden = hidden.detach().double().requires_grad_()
    same_weight = linear.weight.detach().double().requires_grad_()
    expected, _ = plain(same_hidden, same_weight, targets, 1.0)
    expected.sum().backward()
    torch.testing.assert_close(scores.logprobs_N.double(), expected, rtol=1e-5, atol=1e-4)
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad.double(), same_hidden.grad, rtol=0.02, atol=0.2)
    if is_trained:
        torch.testing.assert_close(linear.weight.grad.double(), same_weight.grad, rtol=0.02, atol=0.05)


def test_logits_of_a_trained_head_are_not_rounded_under_autocast(wide_products):
    hidden, linear, targets = random_case(torch.bfloat16)
    linear.weight.data = (linear.weight.data * 8).float()  # as in full fine-tuning
    with torch.autocast("cpu", torch.bfloat16):
        scores = TokenHead(linear, PLACEHOLDERS)(hidden.float().requires_grad_(), targets, 1.0)
    expected, _ = plain(hidden.detach().double(), linear.weight.detach().double(), targets, 1.0)
    torch.testing.assert_close(scores.logprobs_N.detach().double(), expected, rtol=1e-5, atol=1e-4)
    scores.logprobs_N.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_bfloat16_is_summed_in_float32():
    hidden, linear, targets = random_case(torch.bfloat16)
    linear.requires_grad_(False)
    scores = TokenHead(linear, PLACEHOLDERS)(hidden.requires_grad_(), targets, 1.0)
    scores.logprobs_N.sum().backward()
    expected, _ = plain(hidden.detach(), linear.weight, targets, 1.0)
    assert scores.logprobs_N.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(scores.logprobs_N.detach().double(), expected, rtol=0.02, atol=0.05)

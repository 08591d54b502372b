"""Prove on a checkpoint that the learner computes what the model's own forward pass does.

Families that serve many architectures by one class are used only after this. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.errors import ModelError, TiercelError
from tiercel.learner.forms import chosen_form
from tiercel.learner.layout import Continuation, PackItem, pack
from tiercel.learner.learner import Learner
from tiercel.models.generic import FAULTS
from tiercel.models.images import random_picture
from tiercel.models.memory_errors import is_out_of_memory
from tiercel.models.policy import Policy
from tiercel.models.prompts import completion_positions, encode_prompt
from tiercel.models.vision import VisionStore
from tiercel.types import EncodedPrompt, ImageSource, Message, Row

LENGTHS = (5, 1, 8)  # of the completions of each prompt, in tokens
SIZES = ((84, 56), (120, 50), (50, 120))  # of the pictures
SHOWN = ((), (0,), (1, 2))  # which pictures each prompt shows
MOST_TOKENS = 1_000_000  # a proof's prompt is never too long
# The largest difference of a logprob, in nats. Narrow weights round each layer's output, so a fault hides below theirs.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Holds what a proof found. `obstacle`: why completions cannot share their prompt; None where they can."""

    difference: float  # the largest of a logprob, in nats, in the form that is admitted
    obstacle: str | None

    @property
    def line(self) -> str:
        form = "completions share their prompt" if self.obstacle is None else f"form repeated, {self.obstacle}"
        return f"proved: logprobs differ from a plain forward pass by at most {self.difference:.1e}; {form}"


@torch.no_grad()
def prove(policy: Policy) -> Proof:
    """Compare logprobs of random completions with a plain forward pass of each, and keep in the family whether
    completions may share their prompt. The model is in evaluation mode afterwards. Raises ModelError where not even the
    repeated form is right."""
    if getattr(policy.model.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"{_model(policy)} cannot be trained here: its head has a bias")
    family = policy.family
    policy.model.eval()
    try:
        items = _items(policy)
        plain_N = _plain(policy, items)
        worst = _difference(policy, items, "repeated", plain_N)
    except (*FAULTS, TiercelError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{_model(policy)} did not pass its proof: {type(error).__name__}: {error}") from error
    tolerance = TOLERANCES[policy.compute_dtype]
    if not worst <= tolerance:
        raise ModelError(
            f"{_model(policy)} did not pass its proof: logprobs differ from its own forward pass by {worst:.1e}, more "
            f"than {tolerance:.0e}; it needs a family of its own"
        )
    family.unshared = None
    obstacle = family.sharing_obstacle(family.language_model(policy.model).config)
    if obstacle is None:
        obstacle, worst = _shared(policy, items, plain_N, worst)
    family.unshared = obstacle
    return Proof(difference=worst, obstacle=obstacle)


def _shared(policy: Policy, items: list[PackItem], plain_N: Tensor, repeated: float) -> tuple[str | None, float]:
    """Return why completions cannot share their prompt, and the difference of the form that is admitted."""
    form = chosen_form("auto", policy.model.get_input_embeddings().weight.device, None)
    try:
        difference = _difference(policy, items, form, plain_N)
    except FAULTS as error:
        if is_out_of_memory(error):
            raise
        return f"its decoder does not take the form {form} ({type(error).__name__})", repeated
    if not difference <= TOLERANCES[policy.compute_dtype]:
        return f"with a shared prompt its logprobs differ by {difference:.1e}", repeated
    return None, difference


def _difference(policy: Policy, items: list[PackItem], form: str, plain_N: Tensor) -> float:
    packed = pack(items)
    features = VisionStore(policy, 0).features(packed.images)
    found_N = Learner(policy, form, False)(packed, features, 1.0).logprobs_N
    return float((found_N - plain_N).abs().max())


def _items(policy: Policy) -> list[PackItem]:
    """Make prompts without a picture, with one and with two of other sizes, where the family has pictures; each with
    random completions."""
    family, generator = policy.family, torch.Generator().manual_seed(0)
    allowed = torch.tensor([i for i in range(family.vocabulary_size) if i not in family.placeholder_ids])
    items = []
    for number, shown in enumerate(SHOWN):
        prompt = _prompt(policy, number, shown if family.image_marker else ())
        completions = []
        for length in LENGTHS:
            ids_L = allowed[torch.randint(len(allowed), (length,), generator=generator)]
            positions_DL = completion_positions(prompt.positions_DP, length)
            scored_L = torch.ones(length, dtype=torch.bool)
            completions.append(Continuation(token_ids_L=ids_L, positions_DL=positions_DL, is_scored_L=scored_L))
        items.append(PackItem(prompt=prompt, continuations=tuple(completions)))
    return items


def _prompt(policy: Policy, number: int, shown: tuple[int, ...]) -> EncodedPrompt:
    images = [policy.family.encode_image(random_picture(SIZES[place], place)) for place in shown]
    text = "<image>" * len(shown) + f"What is {number} and this?"
    row = Row(
        id="proof",
        messages=(Message(role="user", content=text),),
        images=tuple(ImageSource(path="proof.png") for _ in shown),
        columns={},
        file="proof",
        line=1,
    )
    return encode_prompt(policy.family, row, number, images, system=None, max_prompt_tokens=MOST_TOKENS)


def _plain(policy: Policy, items: list[PackItem]) -> Tensor:
    """Compute the logprobs (N,) of all completions, by the model's own forward pass of each with its prompt."""
    family, device = policy.family, policy.model.get_input_embeddings().weight.device
    found = []
    for item in items:
        for continuation in item.continuations:
            ids_T = torch.cat([item.prompt.token_ids_P, continuation.token_ids_L])
            inputs = {name: value.to(device) for name, value in family.plain_inputs(item.prompt, ids_T).items()}
            with policy.autocast():
                logits_TV = policy.model(**inputs, use_cache=False).logits[0].float()
            logits_TV[:, list(family.placeholder_ids)] = -torch.inf
            scored_LV = logits_TV[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
            found.append(scored_LV.gather(1, continuation.token_ids_L.to(device)[:, None])[:, 0])
    return torch.cat(found)


def _model(policy: Policy) -> str:
    return f"{policy.family.checkpoint.path} ({policy.family.checkpoint.config.model_type})"


def prove_where_needed(policy: Policy, say: Callable[[str], None] = lambda text: None) -> None:
    """Prove the checkpoint of a family that needs it, and say what was found."""
    if policy.family.needs_proof:
        say(prove(policy).line)

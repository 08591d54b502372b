"""A check, on a checkpoint, that the learner computes what the model's own forward pass does.

Families that serve many architectures with one class are used only after this proof. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.errors import ModelError, TiercelError
from tiercel.log import logger
from tiercel.models.families.base import HuggingFaceModel
from tiercel.models.families.generic import FAULTS
from tiercel.models.families.image_transforms import random_picture
from tiercel.models.layers.quantized import is_quantized
from tiercel.models.policy import Policy
from tiercel.models.prompts import completion_positions, encode_prompt
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.packing.pass_options import chosen_form
from tiercel.types import EncodedPrompt, ImageSource, Message, Row

LENGTHS = (5, 1, 8)  # of the completions of each prompt, in tokens
SIZES = ((84, 56), (120, 50), (50, 120))  # of the pictures
SHOWN = ((), (0,), (1, 2))  # which pictures each prompt shows
MOST_TOKENS = 1_000_000  # a proof's prompt is never too long
# The largest allowed difference of a logprob, in nats. Narrow weights round each layer's output, which can hide a
# fault, and in a deep model a correct form may differ by more; the proof is then repeated in float32.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
EXACT = 1e-3  # the same in float32, for a model whose dtype is narrow
NOISES = 4.0  # a correct form differs by at most this many times the difference caused by the dtype itself


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardEquivalence:
    """The result of a proof. `obstacle` says why completions cannot share their prompt, or is None if they can."""

    difference: float  # the largest of any logprob, in nats, in the form that passed
    obstacle: str | None
    rounded: str = ""  # the same in the model's own dtype, if the proof was made in float32

    @property
    def line(self) -> str:
        form = "completions share their prompt" if self.obstacle is None else f"form repeated, {self.obstacle}"
        if self.rounded:
            return (
                f"proved in float32: logprobs differ from a plain forward pass by at most {self.difference:.1e}, "
                f"with rounding by {self.rounded}; {form}"
            )
        return f"proved: logprobs differ from a plain forward pass by at most {self.difference:.1e}; {form}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckedLogprobs:
    """Logprobs (N,) of the same completions, computed in one dtype."""

    plain_N: Tensor
    repeated_N: Tensor
    shared_N: Tensor | None  # None if they cannot share their prompt
    obstacle: str | None  # why

    @property
    def repeated(self) -> float:
        return _largest(self.repeated_N, self.plain_N)

    @property
    def shared(self) -> float:
        return 0.0 if self.shared_N is None else _largest(self.shared_N, self.plain_N)


def _largest(these_N: Tensor, those_N: Tensor) -> float:
    return float((these_N - those_N).abs().max())


@torch.no_grad()
def check_forward_equivalence(policy: Policy) -> ForwardEquivalence:
    """Compare logprobs of random completions with a plain forward pass over each, and record in the family whether
    completions may share their prompt. The model is in evaluation mode afterwards. Raises ModelError if not even the
    repeated form is correct."""
    if getattr(policy.model.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"{_model(policy)} cannot be trained: its head has a bias")
    # A model that is sharded later is still on the CPU, and the autocast of a GPU does not cast there.
    policy = replace(policy, device=policy.model.get_input_embeddings().weight.device)
    family = policy.family
    policy.model.eval()
    family.unshared = None
    try:
        items = _items(policy)
        found = _found(policy, items)
    except (*FAULTS, TiercelError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{_model(policy)} did not pass its proof: {type(error).__name__}: {error}") from error
    tolerance = TOLERANCES[policy.compute_dtype]
    exact = None if max(found.repeated, found.shared) <= tolerance else _found_exactly(policy, items)
    proof = _judged(policy, found, exact, tolerance)
    family.unshared = proof.obstacle
    return proof


def _judged(
    policy: Policy, found: _CheckedLogprobs, exact: _CheckedLogprobs | None, tolerance: float
) -> ForwardEquivalence:
    """Judge by what was found in the model's own dtype. If it was computed in float32 too, that must be exact, and in
    the own dtype as near as rounding lets a plain pass be. Raises ModelError if the proof fails."""
    dtype, remedy = _name(policy.compute_dtype), ""
    limits = [(found, tolerance, dtype)]
    if exact is not None:
        noise = _largest(found.plain_N, exact.plain_N)
        limits = [(exact, EXACT, "float32"), (found, max(tolerance, NOISES * noise), dtype)]
    elif policy.compute_dtype != torch.float32:
        remedy = "; set model.dtype: float32 to see whether it is rounding"
    for each, most, where in limits:
        if not each.repeated <= most:
            remedy = remedy or "; it needs a family of its own"
            raise _failed(policy, each.repeated, f"{most:.0e} in {where}", remedy)
    best = limits[0][0]
    obstacle = found.obstacle or best.obstacle
    for each, most, where in limits:
        if obstacle is None and not each.shared <= most:
            reason = f"with a shared prompt its logprobs differ by {each.shared:.1e}, more than {most:.0e} in {where}"
            obstacle = f"{reason}{remedy}"
    difference, in_dtype = (best.shared, found.shared) if obstacle is None else (best.repeated, found.repeated)
    rounded = "" if exact is None else f"{in_dtype:.1e} in {dtype}"
    return ForwardEquivalence(difference=difference, obstacle=obstacle, rounded=rounded)


def _failed(policy: Policy, difference: float, limit: str, remedy: str) -> ModelError:
    return ModelError(
        f"{_model(policy)} did not pass its proof: logprobs differ from its own forward pass by {difference:.1e}, more "
        f"than {limit}{remedy}"
    )


def _found(policy: Policy, items: list[PackItem]) -> _CheckedLogprobs:
    """Compute the completions' logprobs in all forms that the model supports."""
    plain_N = _plain(policy, items)
    repeated_N = _packed(policy, items, "repeated")
    obstacle = policy.family.sharing_obstacle(policy.family.language_model(policy.model).config)
    shared_N = None
    if obstacle is None:
        form = chosen_form("auto", policy.model.get_input_embeddings().weight.device, None)
        try:
            shared_N = _packed(policy, items, form)
        except FAULTS as error:
            if is_out_of_memory(error):
                raise
            obstacle = f"its decoder does not support the form {form} ({type(error).__name__})"
    return _CheckedLogprobs(plain_N=plain_N, repeated_N=repeated_N, shared_N=shared_N, obstacle=obstacle)


def _found_exactly(policy: Policy, items: list[PackItem]) -> _CheckedLogprobs | None:
    """Compute the same in float32. Return None if that is already the dtype, if weights are quantised, or if memory
    runs out."""
    if policy.compute_dtype == torch.float32 or is_quantized(policy.model):
        return None
    try:
        with _in_float32(policy.model):
            return _found(replace(policy, compute_dtype=torch.float32), items)
    except FAULTS as error:
        if not is_out_of_memory(error):
            raise
        return None


@contextmanager
def _in_float32(model: HuggingFaceModel) -> Iterator[None]:
    """Hold all weights of a model in float32 inside the context. Converting them back afterwards restores them
    exactly."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()}
    own = {key: each.dtype for key, each in tensors.items()}
    try:
        for each in tensors.values():
            each.data = each.data.float()
        yield
    finally:
        for key, each in tensors.items():
            each.data = each.data.to(own[key])


def _packed(policy: Policy, items: list[PackItem], form: str) -> Tensor:
    """Compute the logprobs (N,) as the learner does."""
    packed = pack(items)
    features = VisionStore(policy, 0).features(packed.images)
    learner = PackedPolicy(policy, form, False)
    learner.value_head = None  # logprobs are compared, whatever the policy is trained for
    return learner(packed, features, 1.0).logprobs_N


def _items(policy: Policy) -> list[PackItem]:
    """Build prompts with random completions: one prompt without a picture and, if the family has pictures, one with a
    single picture and one with two of other sizes."""
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
    """Compute the logprobs (N,) of all completions with the model's own forward pass over each and its prompt."""
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model(policy: Policy) -> str:
    return f"{policy.family.checkpoint.path} ({policy.family.checkpoint.config.model_type})"


def prove_where_needed(policy: Policy) -> None:
    """Prove the checkpoint if its family needs that, and log what was found."""
    if policy.family.needs_proof:
        logger.info(check_forward_equivalence(policy).line)

"""Measurement of the learner's memory by running its own code on fake tensors, which have shapes but no memory.

A few decoder layers and two numbers of tokens are enough, because the bytes of a pass are linear in both, up to the
rounding of buffers. L decoder layers, T packed tokens.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.strategies.optimizer import build_optimizer
from tiercel.models.families.base import Family
from tiercel.models.layers.attention import PackAttend, attention_spans_of, route_attention
from tiercel.models.layers.attention_span import Span
from tiercel.models.policy import Policy, make_trainable, weights_dtype
from tiercel.models.weights.loading import DTYPES
from tiercel.packing.batch import prompt_of_no_row
from tiercel.packing.compiling import CompiledLayers
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackedTokens, PackItem, pack
from tiercel.packing.logprobs import GPU_TILE
from tiercel.packing.recurrence import PackedForm
from tiercel.packing.tree import PrefixTree
from tiercel.planning.sizes import with_layers, without_files

PROBED_LAYERS = (2, 3)  # with a single layer, checkpointing keeps other tensors
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default  # of experts
SMALL_SHARE = 0.5  # of the token budget, for the second number of tokens
# Compiled layers keep what Inductor's would keep, because the partition is the same. Operations run one by one here, so
# the temporary tensors are a few percent more than in Inductor's fused kernels.
BACKEND = "aot_eager_decomp_partition"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are created inside and are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile inside, whose operations are counted when they run."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most of the calls ask for a fake tensor's device
            return func(*args)
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):  # tensors from before, and their views, are not counted
                self._count(value.untyped_storage(), is_new=False)
        result = (_grouped_product if func is GROUPED_PRODUCT else func)(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage(), is_new=True)
        return result

    def start_again(self) -> int:
        """Reset the peak, and return the bytes that are alive now."""
        self.peak = self.now
        return self.now

    def _count(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        key = storage._cdata  # an address, which another storage may get after this one is freed
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _grouped_product(tokens: Tensor, weights: Tensor, *more: Any, **options: Any) -> Tensor:
    """Compute a grouped product of any dtype, because fake tensors allow only bfloat16."""
    return GROUPED_PRODUCT(tokens.bfloat16(), weights.bfloat16(), *more, **options).to(tokens.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """The content of a microbatch: groups of one prompt and its completions, as many as fit the budget."""

    prompt_tokens: int
    completion_tokens: int
    group_size: int

    @property
    def group_tokens(self) -> int:
        """Return the tokens of a whole group."""
        return self.prompt_tokens + self.group_size * self.completion_tokens

    def items(self, tokens: int, dimensions: int) -> list[PackItem]:
        """Build groups of `tokens` tokens in total: whole groups, part of one, and the rest in the last prompt."""
        counts: list[int] = []
        left = tokens
        while left >= self.prompt_tokens + self.completion_tokens or not counts:
            count = min(self.group_size, max(1, (left - self.prompt_tokens) // self.completion_tokens))
            counts.append(count)
            left -= self.prompt_tokens + count * self.completion_tokens
        items = [self._item(self.prompt_tokens, count, dimensions) for count in counts]
        items[-1] = self._item(self.prompt_tokens + max(0, left), counts[-1], dimensions)
        return items

    def _item(self, prompt_tokens: int, completions: int, dimensions: int) -> PackItem:
        def ids(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64)

        def positions(count: int) -> Tensor:
            return torch.arange(count).expand(dimensions, -1)

        size = self.completion_tokens
        continuation = Continuation(
            token_ids_L=ids(size), positions_DL=positions(size), is_scored_L=torch.ones(size, dtype=torch.bool)
        )
        prompt = prompt_of_no_row(ids(prompt_tokens), positions(prompt_tokens))
        return PackItem(prompt=prompt, continuations=(continuation,) * completions)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBytes:
    """Peaks above the bytes of the model and of the optimiser's moments."""

    learn: int  # forward and backward of a microbatch, with the gradients of the previous one
    step: int  # gradients and the temporary tensors of the update
    prefill: int  # a pass without gradient over as many tokens of prompts, as the engine makes; 0 if compiled


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBytes:
    """The form a + b L + c T + d L T through four measured points."""

    constant: float
    per_layer: float
    per_token: float
    per_layer_token: float

    def at(self, layers: int, tokens: int) -> int:
        return round(
            self.constant + self.per_layer * layers + self.per_token * tokens + self.per_layer_token * layers * tokens
        )


def fitted(measure: Callable[[int, int], int], tokens: int) -> LinearBytes:
    """Fit the linear form through `measure(layers, tokens)` at the probed numbers."""
    (l1, l2), (t1, t2) = PROBED_LAYERS, (max(1, round(tokens * SMALL_SHARE)), tokens)
    f11, f12, f21, f22 = measure(l1, t1), measure(l1, t2), measure(l2, t1), measure(l2, t2)
    d = (f22 - f21 - f12 + f11) / ((l2 - l1) * (t2 - t1))
    b = (f21 - f11) / (l2 - l1) - d * t1
    c = (f12 - f11) / (t2 - t1) - d * l1
    return LinearBytes(constant=f11 - b * l1 - c * t1 - d * l1 * t1, per_layer=b, per_token=c, per_layer_token=d)


def refitted(start: LinearBytes, measure: Callable[[int], int], tokens: int) -> LinearBytes:
    """Fit the terms with tokens through `measure(layers)` at this number of tokens. The others are those of `start`."""
    l1, l2 = PROBED_LAYERS
    f1, f2 = measure(l1), measure(l2)
    d = ((f2 - f1) / (l2 - l1) - start.per_layer) / tokens
    c = (f1 - start.constant - start.per_layer * l1) / tokens - d * l1
    return replace(start, per_token=c, per_layer_token=d)


NOTHING = LinearBytes(constant=0, per_layer=0, per_token=0, per_layer_token=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionBytes:
    """The bytes of a pass through the whole vision tower, for T tokens that its features replace."""

    frozen: LinearBytes = NOTHING  # the peak without gradient
    kept: LinearBytes = NOTHING  # what the backward pass needs
    trained: LinearBytes = NOTHING  # the peak of forward and backward
    pixels: float = 3 * 28 * 28  # of the picture that a token stands for, on the host


@contextmanager
def younger_garbage() -> Iterator[None]:
    """Limit `gc.collect` to objects that are created inside, because torch and transformers have a million older
    ones."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def fake_tensors() -> FakeTensorMode:
    """Create tensors inside without memory. Layouts stay real, because code reads their numbers."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedModel:
    """A model that is measured by its config alone, and the recipe that trains it."""

    recipe: BaseRecipe
    config: Any
    family: Family

    def empty_policy(self, layers: int, dtype: torch.dtype | None = None) -> Policy:
        """Build the recipe's policy with `layers` decoder layers on torch's meta device, because adding an adapter
        moves tensors, which fake tensors do not allow. `dtype` is that of weights; None: the recipe's."""
        with torch.device("meta"):
            model = self.family.model_class.from_config(
                with_layers(self.config, layers),
                dtype=dtype or weights_dtype(self.recipe),
                attn_implementation="sdpa",
            )
            model.requires_grad_(False)
            return make_trainable(self.family, model.eval(), without_files(self.recipe), torch.device("cpu"))


def fill_with_fakes(model: nn.Module) -> None:
    """Replace the meta device's tensors by fake tensors on the CPU. A shared tensor stays shared. Call this inside
    `fake_tensors`."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_weight else fresh
                held[name] = made[id(tensor)]


class ProbedLearner(PackedPolicy):
    """A learner whose layouts are computed on real tensors, because their code reads numbers."""

    def compile_layers(self) -> None:
        """Compile the layers for the sizes of the first pass, which takes half the time of graphs for any sizes."""
        layers: Any = self.language_model.layers
        self.compiled = CompiledLayers(layers, BACKEND, dynamic=False)

    def _form(self, batch: PackedTokens, first_query: int = 0) -> PackedForm:
        with _disable_current_modes():
            form = super()._form(batch, first_query)
            _ = form.recurrence
            return form

    def _attention(self, tree: PrefixTree, queries: Sequence[Span]) -> PackAttend:
        with _disable_current_modes():
            attend = super()._attention(tree, queries)
            for attention_span in attention_spans_of(self.language_model.config).values():
                attend.prepare(attention_span)
            return attend

    def _repeated_layout(self, batch: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        with _disable_current_modes():
            return super()._repeated_layout(batch)


def _fake_learner(probed: ProbedModel, policy: Policy, form: str) -> ProbedLearner:
    """Build the learner of a policy without memory, with the head's tiles for a GPU."""
    fill_with_fakes(policy.model)
    route_attention(probed.family.language_model(policy.model))
    learner = ProbedLearner(policy, form, probed.recipe.learner.gradient_checkpointing)
    learner.head.tile = GPU_TILE
    return learner


def _learn(learner: ProbedLearner, packed: PackedTokens) -> None:
    """Run forward and backward."""
    scores = learner.train()(packed, None, 1.0)
    (scores.logprobs_N if scores.values_N is None else scores.values_N).sum().backward()


@younger_garbage()
def update_bytes(probed: ProbedModel, layers: int, packed: PackedTokens, form: str, *, compiled: bool) -> UpdateBytes:
    """Measure the peaks of a microbatch and of an update, with the learner's own code and the head's tiles for a GPU.
    The gradients of an earlier microbatch exist already."""
    policy, recipe = probed.empty_policy(layers), probed.recipe
    with fake_tensors(), LiveBytes() as live:
        learner = _fake_learner(probed, policy, form)
        if compiled:
            learner.compile_layers()
        # The optimisers of bitsandbytes cannot make a step with fake tensors, and they need less.
        optim = recipe.optim if recipe.optim.is_of_torch else recipe.optim.model_copy(update={"name": "adamw"})
        optimizer = build_optimizer(policy, optim)
        resident = live.start_again()
        for parameter in policy.trained_parameters().values():
            parameter.grad = torch.empty_like(parameter)
        _learn(learner, packed)
        gc.collect()  # otherwise objects in reference cycles would be counted at random
        learn = live.peak - resident
        live.start_again()
        optimizer.step()
        moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        step = live.peak - resident - moments
        prefill = 0 if compiled else _without_gradient(learner, packed, live)
    return UpdateBytes(learn=learn, step=step, prefill=prefill)


@younger_garbage()
def gathered_bytes(probed: ProbedModel, layers: int, packed: PackedTokens, form: str) -> int:
    """Measure the peak of forward and backward in full fine-tuning under fsdp2, which gathers weights in the dtype of
    the passes and takes each gradient away as soon as it is there."""
    policy = probed.empty_policy(layers, DTYPES[probed.recipe.model.dtype])
    with fake_tensors(), LiveBytes() as live:
        learner = _fake_learner(probed, policy, form)
        for parameter in policy.trained_parameters().values():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        resident = live.start_again()
        _learn(learner, packed)
        return live.peak - resident


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _without_gradient(learner: ProbedLearner, packed: PackedTokens, live: LiveBytes) -> int:
    """Measure the peak of a pass up to the head."""
    before = live.start_again()
    with torch.no_grad():
        learner.eval().scoring_states(packed, None, None)
    return live.peak - before


def packed_case(composition: Composition, tokens: int, dimensions: int) -> PackedTokens:
    """Pack a microbatch of `tokens` tokens."""
    return pack(composition.items(tokens, dimensions))

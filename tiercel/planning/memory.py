"""Bytes of one rank, by purpose and by phase, for every strategy.

Weights are counted, the learner's pass is measured on fake tensors (`probe`), and the rest is computed here.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tiercel.config.engines import EngineKind
from tiercel.config.schema import BaseRecipe, Deepspeed, GrpoRecipe
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.config.trained_parts import keeps_start, whole_parts
from tiercel.models.policy import weights_dtype
from tiercel.models.weights.loading import DTYPES
from tiercel.packing.attention.block_mask import BLOCK
from tiercel.packing.compiling import chosen_backend
from tiercel.planning.devices import Machine
from tiercel.planning.frozen_models import FrozenBytes
from tiercel.planning.probe import NOTHING, LinearBytes, VisionBytes
from tiercel.planning.sizes import ModelSizes
from tiercel.rollout.local.engine import KEPT_BYTES, TOKENS_IN_FLIGHT

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MOMENT_BYTES = {32: 8, 8: 2 + 8 / 256}  # of AdamW's two moments, by their bits; in 8 bits, 256 elements share a scale
MUON_SPARES = 4  # bytes of a weight that it updates: it keeps one moment, AdamW two
HOST_OPTIMIZER_BYTES = 16  # of DeepSpeed on the host: moments, and float32 copies of weight and gradient
HELD_STEPS = 2  # whose pictures a rank holds: the step that it learns from, and the next one when it arrives
AHEAD_STEPS = 3  # that its workers hold: sent, waiting to be sent, and encoded
LAYERS_GATHERED = 3  # FSDP2: the layer that computes, the next one, and the buffer that it arrives in
STATE_BYTES = 4  # per element of a delta net's state, float32
CONTEXT_BYTES = 1_500_000_000  # CUDA's context and NCCL's buffers; assumed, not measured
FRAGMENTS = "fragmentation"
CACHE = "keys and values of the rollout"
FRAGMENTATION = 0.05  # of what PyTorch allocates; assumed
SERVER_SHARE = 0.9  # of its GPU's memory; vLLM's default
VLLM_WORKSPACE = 3_000_000_000  # activations and CUDA graphs of a vLLM engine on one GPU; assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLoad:
    """The sampling and scoring of a step, and what this rank keeps in memory for them."""

    engine: EngineKind
    prompts: int  # of this rank in a step
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    tensor_parallel: int = 1  # ranks that share one vLLM engine
    awake_bytes: int = 0  # of this rank's memory, for a vLLM engine that samples
    asleep_bytes: int = 0  # the same while the learner computes
    moves_to_host: bool = False  # whether its weights move to the host while the learner computes
    engine_prompts: int = 0  # prompts that one vLLM engine completes: those of all ranks that share it, or of a server
    engine_bytes: int = 0  # of one GPU's memory, for that engine
    lookahead: int = 0
    prepacked_bytes: int = 0
    reward_models: FrozenBytes = field(default_factory=FrozenBytes)
    teacher: FrozenBytes = field(default_factory=FrozenBytes)

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def local_prompts(self) -> int:
        """Return how many prompts the local engine completes at once."""
        return max(1, min(self.prompts, TOKENS_IN_FLIGHT // (self.group_size * self.row_tokens)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the learner's work is divided over the ranks."""

    strategy: str
    ranks: int
    tokens: int  # of a microbatch
    on_gpu: bool
    flex_fits: bool = True  # whether the card can run FlexAttention for the model

    @property
    def kind(self) -> StrategyKind:
        return STRATEGY_KINDS[self.strategy]

    def shares(self, recipe: BaseRecipe) -> int:
        """Return the number of ranks that hold one copy of the model together."""
        return min(recipe.train.shard_size or self.ranks, self.ranks)

    def shards(self, recipe: BaseRecipe) -> bool:
        """Return whether a rank holds only a share of the weights."""
        return self.kind.shards_model and self.zero(recipe).stage == 3

    def zero(self, recipe: BaseRecipe) -> Deepspeed:
        """Return the recipe's ZeRO settings if the strategy reads them, else the defaults."""
        return recipe.train.deepspeed if "deepspeed" in self.kind.own_keys else Deepspeed()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The bytes of one rank."""

    strategy: str
    parts: Mapping[str, Mapping[str, int]]  # by phase, then by purpose: the bytes in use at the phase's peak
    host: Mapping[str, int]  # of the host's memory, by purpose
    obstacle: str | None = None  # why it cannot work with any amount of memory

    @property
    def components(self) -> dict[str, int]:
        """Return the largest size of each component over the phases."""
        names = dict.fromkeys(name for parts in self.parts.values() for name in parts)
        in_order = sorted(names, key=lambda name: name == FRAGMENTS)  # last, because it is a share of all others
        return {name: max(parts.get(name, 0) for parts in self.parts.values()) for name in in_order}

    @property
    def phases(self) -> dict[str, int]:
        """Return the peak of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def fits_into(self, machine: Machine) -> bool:
        """Return whether a rank's bytes fit into its device, and those of all ranks of a machine into its host
        memory."""
        has_room = machine.host_bytes is None or self.host_bytes * machine.ranks_together <= machine.host_bytes
        return self.obstacle is None and self.peak <= machine.memory_bytes and has_room

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        return {**asdict(self), "components": self.components, "phases": self.phases}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Peaks of the learner above its weights and moments, as functions of layers and tokens."""

    learn: LinearBytes
    compiled: Callable[[], LinearBytes] | None = None  # `learn` with compiled layers; measured when it is asked for
    gathered: Callable[[], LinearBytes] | None = None  # `learn` with gathered weights, without gradients; as above
    step: LinearBytes
    prefill: LinearBytes = NOTHING
    vision: VisionBytes = field(default_factory=VisionBytes)
    vision_share: float = 0.0  # the largest share of a microbatch's tokens: those of its prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Learner:
    """The bytes of the model and its training on one rank."""

    base: int  # of the language model's weights that stay on the device
    gathered: int  # of other ranks' weights, during a pass
    moments: int
    passes: int
    step: int
    gradients: int
    buffer: int  # for the sum of gradients
    offloaded_weights: int
    offloaded_optimizer: int


def rank_memory(
    recipe: BaseRecipe, sizes: ModelSizes, measured: Measured, rollout: RolloutLoad | None, layout: Layout
) -> RankMemory:
    """Compute the bytes of one rank by phase and purpose."""
    held = _learner(recipe, sizes, measured, layout)
    trains_vision = {"vision", "projector"} & set(whole_parts(recipe))
    vision_width = BYTES["float32"] if trains_vision else weights_dtype(recipe).itemsize
    start = _start(recipe, sizes, layout.shares(recipe) if layout.kind.shards_model else 1)
    sampling = _Sampling() if rollout is None else _sampling(recipe, sizes, measured, rollout, layout)
    on_device = recipe.model.reference == "device"
    always = {
        "weights": held.base + vision_width * sizes.vision_weights,
        "adapter": 4 * sizes.adapter,
        "optimizer moments": held.moments,
        "CUDA and NCCL": CONTEXT_BYTES if layout.on_gpu else 0,
        **({"copy of the start": start} if start and on_device else {}),
        **sampling.always,
    }
    passes = {"a dequantised weight": BYTES[recipe.model.dtype] * sizes.largest_quantized} if sizes.quantize else {}
    learn = {
        "block mask": _block_mask(recipe, sizes, layout),
        "weights gathered for a pass": held.gathered,
        "forward, backward and gradients": max(held.passes, _exchanged(recipe, start, layout)),
    }
    update = {
        "gradient buffer": held.buffer,
        "gradients and the update": max(held.step - held.buffer, held.gradients),
    }
    parts = {
        **({} if rollout is None else {"rollout": {**always, **passes, **sampling.engine}}),
        "learn": {**always, **passes, **learn, **sampling.asleep},
        "update": {**always, **update, **sampling.asleep},
        **{phase: {**always, **sampling.asleep, **own} for phase, own in sampling.scoring.items()},
    }
    if layout.on_gpu:
        parts = {phase: {**each, FRAGMENTS: round(FRAGMENTATION * sum(each.values()))} for phase, each in parts.items()}
    host = {
        "weights, offloaded": held.offloaded_weights,
        "optimizer, offloaded": held.offloaded_optimizer,
        "copy of the start": 0 if on_device else start,
        **sampling.host,
    }
    return RankMemory(
        strategy=layout.strategy,
        parts=parts,
        host={name: size for name, size in host.items() if size},
        obstacle=engine_obstacle(recipe, sizes, rollout, layout.ranks),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampling:
    """The bytes that the rollout adds to a rank, by purpose."""

    always: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, int] = field(default_factory=dict)  # while it samples
    asleep: Mapping[str, int] = field(default_factory=dict)  # of the engine, in all other phases
    scoring: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by phase, before learning
    host: Mapping[str, int] = field(default_factory=dict)


def _sampling(
    recipe: BaseRecipe, sizes: ModelSizes, measured: Measured, rollout: RolloutLoad, layout: Layout
) -> _Sampling:
    scorers, teacher = rollout.reward_models, rollout.teacher
    feature_bytes = BYTES[recipe.model.dtype] * sizes.feature_width * rollout.prompts * rollout.prompt_tokens
    always = {"vision features of a step": feature_bytes}
    scoring = {}
    if scorers.weights:
        always["reward models"] = scorers.weights
        scoring["reward"] = {"scoring": scorers.largest_pass}
    if teacher.weights:
        always["teacher"] = teacher.weights
        scoring["teaching"] = {"the teacher's pass": teacher.largest_pass}
    width = BYTES[recipe.model.dtype] if _casts_gathered(recipe, layout) else weights_dtype(recipe).itemsize
    gathered = sizes.language_bytes(width) if layout.shards(recipe) else 0  # a rank keeps its share beside them
    engine = _engine(recipe, sizes, rollout, gathered, measured)
    asleep = {"vLLM, asleep": rollout.asleep_bytes} if rollout.engine.is_beside else {}
    if rollout.engine.shares_weights and not layout.kind.shards_model:
        if layout.on_gpu:
            engine["trained weights, narrow for decoding"] = narrow = _narrow(recipe, sizes)
            kept = engine[CACHE] + narrow
            asleep = {"kept for decoding": kept if kept <= KEPT_BYTES else 0}
        else:  # of frozen weights, which stay
            always["weights prepacked for decoding"] = _prepacked(recipe, sizes, rollout)
    host = {
        "pictures of steps": picture_bytes(recipe, rollout, measured.vision) if sizes.vision_weights else 0,
        "vLLM's weights, asleep": engine_weights(recipe, sizes, rollout) if rollout.moves_to_host else 0,
    }
    return _Sampling(always=always, engine=engine, asleep=asleep, scoring=scoring, host=host)


def _learner(recipe: BaseRecipe, sizes: ModelSizes, measured: Measured, layout: Layout) -> _Learner:
    """Divide what a strategy shards, and move what it offloads."""
    width, ranks = weights_dtype(recipe).itemsize, layout.shares(recipe)
    base, moments = sizes.language_bytes(width), round(MOMENT_BYTES[recipe.optim.moment_bits] * sizes.trained)
    if recipe.optim.name == "muon":
        moments -= MUON_SPARES * sizes.trained_matrices
    step = 0 if _is_fused(recipe, layout) else measured.step.at(sizes.layers, layout.tokens)
    gathered = offloaded_weights = offloaded_optimizer = 0
    gradients = BYTES["float32"] * sizes.trained
    kind, zero = layout.kind, layout.zero(recipe)
    if layout.shards(recipe):
        in_passes = BYTES[recipe.model.dtype] if _casts_gathered(recipe, layout) else width
        gathered = in_passes * (sizes.root_weights + LAYERS_GATHERED * sizes.largest_layer)
        base = -(-base // ranks)
    is_divided = kind.divides_trained(has_adapters=recipe.lora is not None)
    if is_divided:
        moments, step, gradients = -(-moments // ranks), -(-step // ranks), -(-gradients // ranks)
    if recipe.optim.is_paged:
        moments, offloaded_optimizer = 0, moments
    if zero.offload_parameters:
        base, offloaded_weights = 0, base
    if zero.offload_optimizer:
        moments, offloaded_optimizer = 0, -(-HOST_OPTIMIZER_BYTES * sizes.trained // ranks)
    return _Learner(
        base=base,
        gathered=gathered,
        moments=moments,
        passes=_with_vision(recipe, sizes, measured, layout),
        step=step,
        gradients=gradients,
        buffer=0 if kind.is_alone or is_divided else 4 * sizes.trained,
        offloaded_weights=offloaded_weights,
        offloaded_optimizer=offloaded_optimizer,
    )


def _casts_gathered(recipe: BaseRecipe, layout: Layout) -> bool:
    """Return whether gathered weights, which are trained in float32, are in the dtype of the passes. FSDP2 also takes
    each gradient away as soon as it is there."""
    return layout.kind.casts_gathered and recipe.lora is None


def _is_fused(recipe: BaseRecipe, layout: Layout) -> bool:
    """Return whether an update takes no memory besides the gradients. On a GPU, AdamW is one kernel."""
    return layout.on_gpu and recipe.optim.name != "muon" and "deepspeed" not in layout.kind.own_keys


def _with_vision(recipe: BaseRecipe, sizes: ModelSizes, measured: Measured, layout: Layout) -> int:
    """Return the peak of a microbatch's passes, including that of its images through the tower, which ranks do not
    share. A frozen tower's pass ends before the learner starts; a trained one keeps its tensors until its own backward
    pass."""
    tokens, learn = layout.tokens, measured.learn
    if measured.compiled is not None and _compiles(recipe, sizes, layout):
        learn = measured.compiled()
    own = -(-tokens // recipe.train.context_parallel)
    most = learn.at(sizes.layers, own)
    if measured.gathered is not None and _casts_gathered(recipe, layout):
        summed = (BYTES[recipe.model.dtype] + BYTES["float32"]) * sizes.root_weights  # the root's gradients, last
        shares = -(-BYTES["float32"] * sizes.trained // layout.shares(recipe))
        most = max(measured.gathered().at(sizes.layers, own), summed) + shares
    passes, vision = most + _gathered_keys(recipe, sizes, tokens), measured.vision
    seen = round(measured.vision_share * tokens)
    if not sizes.trained_vision:
        return max(passes, vision.frozen.at(0, seen))
    return max(passes + vision.kept.at(0, seen), vision.trained.at(0, seen))


def _gathered_keys(recipe: BaseRecipe, sizes: ModelSizes, tokens: int) -> int:
    """Return the bytes of the keys and values that ranks gather from each other. A layer that is recomputed whole keeps
    them only during its own pass."""
    if recipe.train.context_parallel == 1:
        return 0
    layers = 1 if recipe.learner.gradient_checkpointing == "full" else sizes.cached_layers
    return tokens * layers * cache_token_bytes(recipe, sizes, 1) // max(1, sizes.cached_layers)


def _start(recipe: BaseRecipe, sizes: ModelSizes, shares: int) -> int:
    """Return the bytes of the frozen copy that the KL penalty compares with, over all parts that are trained whole. The
    language model's copy is sharded over `shares` ranks."""
    if not keeps_start(recipe):
        return 0
    vision = sizes.trained_vision - sizes.vision_adapter
    language = sizes.trained - sizes.trained_vision if recipe.lora is None else 0
    return BYTES[recipe.model.dtype] * (vision - (-language // shares))


def _is_flex(recipe: BaseRecipe, sizes: ModelSizes, layout: Layout) -> bool:
    """Return whether the learner's attention is FlexAttention."""
    asked = recipe.learner.form
    return layout.on_gpu and layout.flex_fits and (asked == "flex" or (asked == "auto" and not sizes.obstacle))


def _compiles(recipe: BaseRecipe, sizes: ModelSizes, layout: Layout) -> bool:
    """Return whether the learner's layers are compiled under this strategy."""
    form = "flex" if _is_flex(recipe, sizes, layout) else recipe.learner.form
    device = torch.device("cuda" if layout.on_gpu else "cpu")
    return chosen_backend(recipe, layout.kind, form, device)[0] is not None


def _block_mask(recipe: BaseRecipe, sizes: ModelSizes, layout: Layout) -> int:
    """Return the bytes of FlexAttention's block mask. For queries and for keys, it lists the blocks that are partly
    visible and those that are fully visible."""
    blocks = -(-layout.tokens // BLOCK)
    own = -(-blocks // recipe.train.context_parallel)
    return 4 * BYTES["float32"] * (blocks + 1) * own if _is_flex(recipe, sizes, layout) else 0


def _exchanged(recipe: BaseRecipe, start: int, layout: Layout) -> int:
    """Return the bytes that are needed while the copy of the start replaces the weights. Under fsdp2, the weights are
    set aside in float32; otherwise a copy on the host is brought to the device."""
    if layout.kind.shards_model:
        return start * BYTES["float32"] // BYTES[recipe.model.dtype]
    return start if recipe.model.reference == "cpu" else 0


def _engine(
    recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad, gathered: int, measured: Measured
) -> dict[str, int]:
    """Return the bytes of the engine. The local one holds keys and values, and the largest of its passes, for the
    largest batch of prompts. `gathered` is the number of bytes of the language model that it must gather."""
    if rollout.engine.is_served:  # on GPUs of its own
        return {}
    if rollout.engine.is_beside:
        return {"vLLM, awake": rollout.awake_bytes}
    prompts = rollout.local_prompts
    rows = prompts * rollout.group_size
    held = prompts * rollout.prompt_tokens + rows * rollout.completion_tokens
    prefill = measured.prefill.at(0, prompts * rollout.prompt_tokens)  # casts of the layers' weights are not kept
    return {
        CACHE: cache_token_bytes(recipe, sizes, 1) * held + STATE_BYTES * sizes.state_elements * rows,
        "prefill, logits or the vision pass": max(
            prefill,
            rows * sizes.vocabulary * (BYTES[recipe.model.dtype] + 3 * 4),
            measured.vision.frozen.at(0, prompts * rollout.prompt_tokens),
        ),
        "weights gathered for the rollout": gathered,
    }


def picture_bytes(recipe: BaseRecipe, rollout: RolloutLoad, vision: VisionBytes) -> int:
    """Return an upper bound of the host's bytes for the pictures of one rank's prompts: every token of a prompt counts
    as one of a picture. Completions add none."""
    steps = HELD_STEPS + rollout.lookahead + (AHEAD_STEPS if recipe.data.workers else 0)
    return round(vision.pixels * rollout.prompt_tokens) * rollout.prompts * steps


def _prepacked(recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad) -> int:
    """Return the bytes of the copies that a CPU decodes from, which exist only in float32."""
    if recipe.model.dtype != "float32":
        return 0
    return min(rollout.prepacked_bytes, BYTES["float32"] * sizes.language_weights)


def _narrow(recipe: BaseRecipe, sizes: ModelSizes) -> int:
    """Return the bytes of the copies that a GPU decodes from if autocast would otherwise cast float32 weights."""
    if recipe.model.dtype == "float32":
        return 0
    return BYTES[recipe.model.dtype] * (sizes.trained - sizes.trained_vision + sizes.joined_adapter)


def cache_token_bytes(recipe: BaseRecipe, sizes: ModelSizes, tensor_parallel: int) -> int:
    """Return the bytes of one token's keys and values on one of the ranks that share the heads."""
    heads = max(1, sizes.key_heads // tensor_parallel)
    return 2 * BYTES[recipe.model.dtype] * sizes.cached_layers * heads * sizes.head_size


def engine_weights(recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad) -> int:
    """Return the bytes of a vLLM engine's weights on one of the ranks that share it."""
    return BYTES[recipe.model.dtype] * sizes.weights // rollout.tensor_parallel


def cached_rows(recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad) -> int:
    """Return how many completions with their prompts a vLLM engine can hold at once. This is a lower bound, because the
    sharing of prompts is not counted."""
    room = rollout.engine_bytes - VLLM_WORKSPACE - engine_weights(recipe, sizes, rollout)
    return max(0, room) // (cache_token_bytes(recipe, sizes, rollout.tensor_parallel) * rollout.row_tokens)


def engine_obstacle(recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad | None, ranks: int) -> str | None:
    """Return why a vLLM engine cannot work on this number of ranks, or None if it can."""
    if rollout is None or not rollout.engine.is_beside:
        return None
    for count, what in ((ranks, "ranks"), (sizes.heads, "attention heads")):
        if count % rollout.tensor_parallel:
            return f"rollout.vllm.tensor_parallel: {rollout.tensor_parallel} does not divide {count} {what}"
    if cached_rows(recipe, sizes, rollout) == 0:
        weights = engine_weights(recipe, sizes, rollout)
        return (
            f"rollout.vllm.gpu_memory_utilization: {rollout.awake_bytes / 1e9:.1f} GB hold {weights / 1e9:.1f} GB of "
            f"weights, {VLLM_WORKSPACE / 1e9:.0f} GB of workspace and not one row of {rollout.row_tokens} tokens"
        )
    return None


def step_rollout(recipe: GrpoRecipe, ranks: int, prompt_tokens: int, memory_bytes: int) -> RolloutLoad:
    """Compute the recipe's rollout on one rank, for prompts of this length and this many bytes of memory. A server is
    assumed to be one GPU of the same kind."""
    asked, vllm, engine = recipe.rollout, recipe.rollout.vllm, recipe.rollout.engine_kind
    awake = round(memory_bytes * vllm.gpu_memory_utilization) if engine.is_beside else 0
    prompts = -(-recipe.optim.prompts_per_step // ranks)
    return RolloutLoad(
        engine=engine,
        prompts=prompts,
        engine_prompts=-(-recipe.optim.prompts_per_step // len(asked.urls))
        if engine.is_served
        else prompts * vllm.tensor_parallel,
        engine_bytes=round(SERVER_SHARE * memory_bytes) if engine.is_served else awake,
        lookahead=asked.lookahead,
        prepacked_bytes=asked.prepacked_bytes,
        prompt_tokens=prompt_tokens,
        completion_tokens=asked.longest,
        group_size=asked.group_size,
        tensor_parallel=vllm.tensor_parallel,
        awake_bytes=awake,
        asleep_bytes=awake if vllm.sleep_level == 0 else min(awake, VLLM_WORKSPACE),
        moves_to_host=engine.is_beside and vllm.sleep_level == 1,
    )

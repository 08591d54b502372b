"""Bytes of one rank, by what they are for and by phase, for every strategy.

Weights are counted, the learner's pass is measured on fake tensors (`probe`), the rest is arithmetic that stands here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.distributed.strategy import SHARDING
from tiercel.models.loading import DTYPES
from tiercel.models.policy import weights_dtype
from tiercel.planning.probe import LinearBytes
from tiercel.planning.reward_models import RewardModelBytes
from tiercel.planning.sizes import ModelSizes
from tiercel.rollout.local import TOKENS_IN_FLIGHT

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MOMENT_BYTES = 8  # AdamW's two, float32
LAYERS_GATHERED = 3  # FSDP2: the one that computes, the next one, and the buffer that it arrives in
CONTEXT_BYTES = 1_500_000_000  # CUDA's context and NCCL's buffers; measured on no card here, so stated
FRAGMENTATION = 0.05  # of what PyTorch allocates; likewise
SERVER_SHARE = 0.9  # of its GPU that a vLLM server takes where it is not told otherwise
VLLM_WORKSPACE = 3_000_000_000  # a vLLM engine's activations and CUDA graphs on one GPU; likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Who samples and scores beside the learner, and how much of it lies on this rank."""

    engine: str
    prompts: int  # of this rank in a step
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    tensor_parallel: int = 1  # ranks that share one vLLM engine
    awake_bytes: int = 0  # what a vLLM engine takes of this rank
    asleep_bytes: int = 0  # and while the learner works
    engine_prompts: int = 0  # that one vLLM engine completes: of all ranks that share it, or of a server
    engine_bytes: int = 0  # of one GPU, for that engine
    lookahead: int = 0
    prepacked_bytes: int = 0
    reward_models: RewardModelBytes = field(default_factory=RewardModelBytes)

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One rank's bytes."""

    strategy: str
    components: Mapping[str, int]
    phases: Mapping[str, int]  # the most that lives at a time, in each
    obstacle: str | None = None  # what keeps it from working however much memory there is

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    def fits(self, memory_bytes: int) -> bool:
        return self.obstacle is None and self.peak <= memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Peaks of the learner above its weights and moments, by layers and tokens."""

    learn: LinearBytes
    step: LinearBytes


def rank_memory(
    recipe: BaseRecipe,
    sizes: ModelSizes,
    measured: Measured,
    rollout: Rollout | None,
    *,
    strategy: str,
    ranks: int,
    tokens: int,
    on_gpu: bool,
) -> RankMemory:
    """What a rank of `ranks` holds with microbatches of `tokens`."""
    is_lora = recipe.lora is not None
    weight_bytes = weights_dtype(recipe).itemsize
    base = weight_bytes * sizes.language_weights
    layer, root = weight_bytes * sizes.layer_weights, weight_bytes * sizes.root_weights
    vision_bytes = BYTES["float32"] if {"vision", "projector"} & set(whole_parts(recipe)) else weight_bytes
    vision = vision_bytes * sizes.vision_weights
    adapter = 4 * sizes.adapter
    moments = MOMENT_BYTES * sizes.trained
    learn = measured.learn.at(sizes.layers, tokens)
    step = measured.step.at(sizes.layers, tokens)
    gathered = 0
    if strategy in SHARDING:
        zero = recipe.train.deepspeed
        is_whole = strategy == "deepspeed" and zero.stage == 2
        if not is_whole:
            gathered = root + LAYERS_GATHERED * layer
            base = 0 if strategy == "deepspeed" and zero.offload_parameters else -(-base // ranks)
        if strategy == "deepspeed" or not is_lora:
            moments = -(-moments // ranks)
            step = -(-step // ranks)
        if strategy == "deepspeed" and zero.offload_optimizer:
            moments = 0
    flat = 4 * sizes.trained if strategy == "ddp" or (strategy == "fsdp2" and is_lora) else 0
    start = _start(recipe, sizes, ranks if strategy == "fsdp2" else 1)
    resident = base + vision + adapter + moments + (CONTEXT_BYTES if on_gpu else 0)
    if recipe.model.reference == "device":
        resident += start
    features = sampling = asleep = copies = 0
    scorers = RewardModelBytes()
    engine: dict[str, int] = {}
    if rollout is not None:
        features = BYTES[recipe.model.dtype] * sizes.feature_width * rollout.prompts * rollout.prompt_tokens
        asleep = rollout.asleep_bytes
        scorers = rollout.reward_models
        resident += scorers.weights
        engine = _engine(recipe, sizes, rollout, weight_bytes * sizes.language_weights - base)
        sampling = sum(engine.values()) - asleep
        if rollout.engine == "local" and not on_gpu and strategy not in SHARDING:
            copies = _prepacked(recipe, sizes, rollout)
            resident += copies  # those of frozen weights stay
    phases = {
        "rollout": resident + features + sampling,
        "learn": resident + features + gathered + max(learn, start) + asleep,
        "update": resident + features + max(step, flat + 4 * sizes.trained) + asleep,
    }
    if scorers.weights:
        phases["reward"] = resident + features + asleep + scorers.largest_pass
    if rollout is None:
        del phases["rollout"]
    slack = 1 + (FRAGMENTATION if on_gpu else 0)
    return RankMemory(
        strategy=strategy,
        components={
            "weights": base + vision,
            "weights gathered for a pass": gathered,
            "adapter": adapter,
            "optimizer moments": moments,
            **({"copy of the start": start} if start else {}),
            "forward, backward and gradients": learn,
            "gradient buffer": flat,
            "vision features of a step": features,
            **engine,
            **({"weights prepacked for decoding": copies} if copies else {}),
            **({"reward models": scorers.weights, "scoring": scorers.largest_pass} if scorers.weights else {}),
            "CUDA and NCCL": CONTEXT_BYTES if on_gpu else 0,
        },
        phases={name: round(value * slack) for name, value in phases.items()},
        obstacle=_obstacle(recipe, sizes, rollout, ranks),
    )


def _start(recipe: BaseRecipe, sizes: ModelSizes, shares: int) -> int:
    """Bytes of the frozen copy that the KL penalty compares with: of what is trained whole, the language model's shared
    out over `shares` ranks."""
    if not keeps_start(recipe):
        return 0
    vision = sizes.trained_vision - sizes.vision_adapter
    language = sizes.trained - sizes.trained_vision if recipe.lora is None else 0
    return BYTES[recipe.model.dtype] * (vision - (-language // shares))


def _engine(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout, missing: int) -> dict[str, int]:
    """Bytes of what samples. `missing`: of the language model, which the local engine gathers."""
    if rollout.engine == "vllm-server":  # on GPUs of its own
        return {}
    if rollout.engine == "vllm":
        return {"vLLM, awake": rollout.awake_bytes, "vLLM, asleep": rollout.asleep_bytes}
    return {**_local_engine(recipe, sizes, rollout), "weights gathered for the rollout": missing}


def _prepacked(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout) -> int:
    """Bytes of the copies that a CPU decodes from, in float32 only."""
    if recipe.model.dtype != "float32":
        return 0
    return min(rollout.prepacked_bytes, BYTES["float32"] * sizes.language_weights)


def _local_engine(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout) -> dict[str, int]:
    """Bytes of keys and values, and of the logits that are drawn from, of the largest batch of prompts."""
    prompts = max(1, min(rollout.prompts, TOKENS_IN_FLIGHT // (rollout.group_size * rollout.row_tokens)))
    rows = prompts * rollout.group_size
    held = prompts * rollout.prompt_tokens + rows * rollout.completion_tokens
    return {
        "keys and values of the rollout": cache_token_bytes(recipe, sizes, 1) * held,
        "decoding": rows * sizes.vocabulary * (BYTES[recipe.model.dtype] + 3 * 4),
    }


def cache_token_bytes(recipe: BaseRecipe, sizes: ModelSizes, tensor_parallel: int) -> int:
    """Bytes of one token's keys and values on one of the ranks that share its heads."""
    heads = max(1, sizes.key_heads // tensor_parallel)
    return 2 * BYTES[recipe.model.dtype] * sizes.layers * heads * sizes.head_size


def cached_rows(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout) -> int:
    """Prompts with a completion that a vLLM engine holds at a time, none of them shared, to be on the safe side."""
    weights = BYTES[recipe.model.dtype] * sizes.weights // rollout.tensor_parallel
    room = rollout.engine_bytes - VLLM_WORKSPACE - weights
    return max(0, room) // (cache_token_bytes(recipe, sizes, rollout.tensor_parallel) * rollout.row_tokens)


def _obstacle(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout | None, ranks: int) -> str | None:
    if rollout is None or rollout.engine != "vllm":
        return None
    for count, what in ((ranks, "ranks"), (sizes.heads, "attention heads")):
        if count % rollout.tensor_parallel:
            return f"rollout.vllm.tensor_parallel: {rollout.tensor_parallel} does not divide {count} {what}"
    if cached_rows(recipe, sizes, rollout) == 0:
        weights = BYTES[recipe.model.dtype] * sizes.weights // rollout.tensor_parallel
        return (
            f"rollout.vllm.gpu_memory_utilization: {rollout.awake_bytes / 1e9:.1f} GB hold {weights / 1e9:.1f} GB of "
            f"weights, {VLLM_WORKSPACE / 1e9:.0f} GB of workspace and not one row of {rollout.row_tokens} tokens"
        )
    return None


def step_rollout(recipe: GrpoRecipe, ranks: int, prompt_tokens: int, memory_bytes: int) -> Rollout:
    """The recipe's rollout on one of the ranks, with prompts of this length and this much memory. A server is taken to
    be one GPU of the same kind."""
    asked, vllm = recipe.rollout, recipe.rollout.vllm
    awake = round(memory_bytes * vllm.gpu_memory_utilization) if asked.engine == "vllm" else 0
    prompts = -(-recipe.optim.prompts_per_step // ranks)
    is_served = asked.engine == "vllm-server"
    return Rollout(
        engine=asked.engine,
        prompts=prompts,
        engine_prompts=-(-recipe.optim.prompts_per_step // len(asked.urls))
        if is_served
        else prompts * vllm.tensor_parallel,
        engine_bytes=round(SERVER_SHARE * memory_bytes) if is_served else awake,
        lookahead=asked.lookahead,
        prepacked_bytes=asked.prepacked_bytes,
        prompt_tokens=prompt_tokens,
        completion_tokens=asked.max_new_tokens,
        group_size=asked.group_size,
        tensor_parallel=vllm.tensor_parallel,
        awake_bytes=awake,
        asleep_bytes=awake if vllm.sleep_level == 0 else min(awake, VLLM_WORKSPACE),
    )

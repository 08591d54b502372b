"""Bytes of one rank, by what they are for and by phase, for every strategy.

Weights are counted, the learner's pass is measured on fake tensors (`probe`), the rest is arithmetic that stands here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.models.loading import DTYPES
from tiercel.models.policy import weights_dtype
from tiercel.planning.probe import LinearBytes
from tiercel.planning.sizes import ModelSizes
from tiercel.rollout.local import TOKENS_IN_FLIGHT

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MOMENT_BYTES = 8  # AdamW's two, float32
LAYERS_GATHERED = 3  # FSDP2: the one that computes, the next one, and the buffer that it arrives in
CONTEXT_BYTES = 1_500_000_000  # CUDA's context and NCCL's buffers; measured on no card here, so stated
FRAGMENTATION = 0.05  # of what PyTorch allocates; likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Who samples beside the learner, and how much of it lies on this rank."""

    engine: str  # local or vllm
    prompts: int  # of this rank in a step
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    engine_ranks: int = 1  # tensor-parallel ranks that share one vLLM engine
    engine_cache_bytes: int = 0  # KV cache of a vLLM engine on this rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One rank's bytes."""

    strategy: str
    components: Mapping[str, int]
    phases: Mapping[str, int]  # the most that lives at a time, in each

    @property
    def peak(self) -> int:
        return max(self.phases.values())


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
    vision = weight_bytes * sizes.vision_weights
    adapter = 4 * sizes.adapter
    moments = MOMENT_BYTES * sizes.trained
    learn = measured.learn.at(sizes.layers, tokens)
    step = measured.step.at(sizes.layers, tokens)
    gathered = 0
    if strategy in ("fsdp2", "deepspeed"):
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
    features = kv = engine = decoding = 0
    if rollout is not None:
        features = BYTES[recipe.model.dtype] * sizes.hidden * rollout.prompts * rollout.prompt_tokens
        if rollout.engine == "local":
            kv, decoding = _local_engine(recipe, sizes, rollout)
        else:
            engine = BYTES[recipe.model.dtype] * sizes.weights // rollout.engine_ranks + rollout.engine_cache_bytes
    resident = base + vision + adapter + moments + engine + (CONTEXT_BYTES if on_gpu else 0)
    whole = weight_bytes * sizes.language_weights - base if strategy in ("fsdp2", "deepspeed") else 0
    phases = {
        "rollout": resident + features + (kv + decoding + whole if engine == 0 and rollout is not None else 0),
        "learn": resident + features + gathered + learn,
        "update": resident + features + max(step, flat + 4 * sizes.trained),
    }
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
            "forward, backward and gradients": learn,
            "gradient buffer": flat,
            "vision features of a step": features,
            "weights gathered for the rollout": whole if engine == 0 and rollout is not None else 0,
            "keys and values of the rollout": kv,
            "decoding": decoding,
            "vLLM, its keys and values included": engine,
            "CUDA and NCCL": CONTEXT_BYTES if on_gpu else 0,
        },
        phases={name: round(value * slack) for name, value in phases.items()},
    )


def _local_engine(recipe: BaseRecipe, sizes: ModelSizes, rollout: Rollout) -> tuple[int, int]:
    """Bytes of keys and values, and of the logits that are drawn from, of the largest batch of prompts."""
    width = BYTES[recipe.model.dtype]
    row = rollout.prompt_tokens + rollout.completion_tokens
    prompts = max(1, min(rollout.prompts, TOKENS_IN_FLIGHT // (rollout.group_size * row)))
    rows = prompts * rollout.group_size
    held = prompts * rollout.prompt_tokens + rows * rollout.completion_tokens
    keys_and_values = 2 * width * sizes.layers * sizes.key_heads * sizes.head_size * held
    return keys_and_values, rows * sizes.vocabulary * (width + 3 * 4)


def step_rollout(recipe: GrpoRecipe, ranks: int, prompt_tokens: int) -> Rollout:
    """The recipe's rollout on one of the ranks, with prompts of this length."""
    return Rollout(
        engine=recipe.rollout.engine,
        prompts=-(-recipe.optim.prompts_per_step // ranks),
        prompt_tokens=prompt_tokens,
        completion_tokens=recipe.rollout.max_new_tokens,
        group_size=recipe.rollout.group_size,
    )

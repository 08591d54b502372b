"""Part d: the local engine's decoding, compared with the least time in which a card can read what a token needs.

A token's step reads all weights of the decoder and the head once, each prompt's keys and values once for its whole
group, and each row's own keys and values.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.gpu.models import MODELS, decode_weight_bytes, random_policy
from benchmarks.gpu.running import Cell
from benchmarks.gpu.setup import Clock, Setup
from benchmarks.gpu.steps import Shape, make_prompts
from benchmarks.peers_report import rounded, spread
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams

SHAPES = {  # new tokens as a run would allow them; all rows continue to the end
    "8 prompts x 8": Shape(side=952, prompt_tokens=1180, completion_tokens=512, group_size=8),
    "1 prompt x 8": Shape(side=952, prompt_tokens=1180, completion_tokens=512, group_size=8, groups=1),
    "32 prompts x 8": Shape(side=448, prompt_tokens=280, completion_tokens=1024, group_size=8, groups=32),
}
TOY_SHAPES = {"2 prompts x 3": Shape(side=56, prompt_tokens=14, completion_tokens=32, group_size=3, groups=2)}


def decoding_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield one cell for each model and number of rows."""
    for model in ["toy"] if is_toy else ["7b", "3b"]:
        for name, shape in (TOY_SHAPES if is_toy else SHAPES).items():
            yield Cell(part="d", name=f"{model}, {name}", run=partial(measured, model, shape))


def params_of(group_size: int, new_tokens: int) -> SamplingParams:
    """Return parameters for exactly this number of tokens, with no end token before them."""
    return SamplingParams(
        group_size=group_size,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=(),
        greedy=False,
    )


def measured(model: str, shape: Shape, setup: Setup) -> dict[str, Any]:
    """Return the seconds of a token's step in the second half of the new tokens, and of what comes before the first
    token: prefill, and on CUDA the capture of the decoder's graph."""
    policy = random_policy(MODELS[model], setup.device, setup.dtype)
    sampler = LocalSampler(policy, VisionStore(policy, cache_bytes=0))  # features exist after the first run
    prompts, whole = make_prompts(policy, shape), shape.completion_tokens
    half = whole // 2

    def seconds(new_tokens: int) -> float:
        clock = Clock(setup)
        with clock.running():
            sampler.sample(prompts, params_of(shape.group_size, new_tokens), [1000 * i for i in range(len(prompts))])
        return clock.seconds[0]

    seconds(whole)
    setup.free()
    pairs = [(seconds(half), seconds(whole)) for _ in range(setup.repetitions)]
    steps = [(all_of_it - first) / (whole - half) for first, all_of_it in pairs]
    step = spread(steps)
    read = bytes_of_a_step(policy, replace(shape, completion_tokens=(half + whole) // 2))
    floor = None if setup.card is None else read["total"] / setup.card.bandwidth
    return {
        "model": model,
        **asdict(shape),
        "step_seconds": step,
        "start_seconds": spread([first - (half - 1) * each for (first, _), each in zip(pairs, steps, strict=True)]),
        "tokens_per_second": rounded(shape.rows / step["median"]),
        "bytes_of_a_step": read,
        "floor_seconds": None if floor is None else rounded(floor),
        "floor_share": None if floor is None else rounded(floor / step["median"]),
        "peak_bytes": setup.peak_bytes,
    }


def bytes_of_a_step(policy: Policy, shape: Shape) -> dict[str, int]:
    """Return the fewest bytes that a token's step reads if each row has `completion_tokens` of its own."""
    config = policy.family.checkpoint.config.get_text_config()
    head_size = config.hidden_size // config.num_attention_heads
    width = policy.compute_dtype.itemsize
    of_a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * width
    tokens = shape.groups * shape.prompt_tokens + shape.tokens
    weights = decode_weight_bytes(policy)
    return {"weights": weights, "keys_and_values": of_a_token * tokens, "total": weights + of_a_token * tokens}

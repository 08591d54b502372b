"""Tokens per second of the local engine on a CPU, compared with the limit that reading the weights sets.

    python -m benchmarks.decode

One prompt with one 448-pixel picture, eight completions, vocabulary 152k, 8 layers of 512, fp32. A decoding step reads
every weight of the decoder and the head once; the bandwidth is that of summing the head's weight.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.drivers.learner_step import make_policy, make_prompt
from benchmarks.shapes import save_checkpoint, save_images
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams

ROOT = Path(__file__).parents[1]
REPETITIONS, TOKENS, GROUP = 5, 64, 8


def seconds(work: Callable[[], object]) -> float:
    """Return the median over the repetitions, after one that does not count."""
    taken = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def params(tokens: int) -> SamplingParams:
    """Return the parameters for completions of exactly this length."""
    return SamplingParams(
        group_size=GROUP,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=(),
        greedy=False,
    )


def main() -> None:
    scratch = ROOT / "runs" / "bench-peers"
    model = scratch / "model-152064-8"
    if not (model / "preprocessor_config.json").is_file():
        save_checkpoint(model, 152_064, 8)
    save_images(scratch / "images-decode", 448, 1)
    policy = make_policy(model)
    prompt = make_prompt(policy, [scratch / "images-decode" / "00.png"], questions=1)
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    whole, half = (seconds(lambda n=n: sampler.sample([prompt], params(n), [0])) for n in (TOKENS, TOKENS // 2))
    step = (whole - half) / (TOKENS - TOKENS // 2)
    head = policy.model.get_output_embeddings().weight
    bandwidth = head.nbytes / seconds(head.sum)
    layers = policy.family.language_model(policy.model).layers
    weights = head.nbytes + sum(parameter.nbytes for parameter in layers.parameters())
    floor = weights / bandwidth
    print(f"{weights / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: {floor * 1e3:.1f} ms a token at least")
    print(f"{step * 1e3:.1f} ms a token: {GROUP / step:.0f} tokens/s of {GROUP / floor:.0f}, {floor / step:.0%}")


if __name__ == "__main__":
    with torch.no_grad():
        main()

"""tiercel's learner and local sampler on one CUDA GPU, in the shapes of Qwen2.5-VL 3B and 7B with random weights.

    python -m benchmarks.gpu --models 3b --cells short long-completion --repetitions 5
    python -m benchmarks.gpu --toy

A step is one update without the optimiser: every group's vision features, forward, backward. tiercel's learner and a
plain one (transformers' forward with the prompt repeated for every completion; see gpu_learners.py) take turns, each
with and without activation checkpointing. MFU is of the hardware: the operations that a step executes (see flops.py),
recomputed layers included, by its time and the card's dense bfloat16 peak. LoRA weights are float32, as tiercel
trains them; their operations are counted like all others.

`--toy` runs the same code in float32 on CPU in seconds, and writes nothing unless --results is given.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.flops import DecoderShape, decoder_shape
from benchmarks.gpu_learners import PlainLearner, SharedLearner, set_checkpointing
from benchmarks.gpu_models import MODELS, decode_weight_bytes, random_policy
from benchmarks.peers_report import rounded, spread
from benchmarks.random_groups import random_group, random_prompt
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.tiny_models import noise_image
from tiercel.learner.batch import AdvantageGroup
from tiercel.learner.forms import AUTO
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.rollout.local import LocalSampler
from tiercel.rollout.sampler import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One shape of a step: P prompt tokens, of which an image of side / 28 squared, C and G."""

    side: int  # pixels
    prompt_tokens: int
    completion_tokens: int
    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a card can do at best: dense bfloat16 operations and bytes of its memory, per second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to measure."""

    models: tuple[str, ...]  # names in gpu_models.MODELS
    cells: tuple[str, ...]  # names in CELLS
    groups: int  # per step
    budget: int  # tokens of a microbatch
    repetitions: int  # counted steps of each learner, after one that does not count
    decode_tokens: int  # new tokens of a decoding measurement, at most the cell's own
    device: torch.device
    dtype: torch.dtype
    card: Card | None  # None: no share of a peak is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One update as measured. `gradient`: flat, on CPU, where it was asked for."""

    seconds: float
    peak_bytes: int | None  # None on CPU
    gradient: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A learner with or without activation checkpointing."""

    name: str
    learner: SharedLearner | PlainLearner
    is_checkpointed: bool


CELLS = {
    "short": Cell(side=448, prompt_tokens=280, completion_tokens=64, group_size=8),
    "large-image": Cell(side=952, prompt_tokens=1180, completion_tokens=200, group_size=8),
    "long-completion": Cell(side=448, prompt_tokens=280, completion_tokens=512, group_size=8),
    "toy": Cell(side=56, prompt_tokens=14, completion_tokens=12, group_size=3),
}
CARDS = {  # by a part of the card's name; the first that matches counts
    "B200": Card(flops=2250e12, bandwidth=8.0e12),
    "H200": Card(flops=989e12, bandwidth=4.8e12),
    "H100 NVL": Card(flops=835e12, bandwidth=3.9e12),
    "H100 PCIe": Card(flops=756e12, bandwidth=2.0e12),
    "H100": Card(flops=989e12, bandwidth=3.35e12),
    "H20": Card(flops=148e12, bandwidth=4.0e12),
    "A100-SXM4-80GB": Card(flops=312e12, bandwidth=2.039e12),
    "A100 80GB": Card(flops=312e12, bandwidth=1.935e12),
    "A100": Card(flops=312e12, bandwidth=1.555e12),
    "L40S": Card(flops=362e12, bandwidth=0.864e12),
    "RTX 4090": Card(flops=165e12, bandwidth=1.008e12),
}
TOY = Options(
    models=("toy",),
    cells=("toy",),
    groups=2,
    budget=64,
    repetitions=2,
    decode_tokens=12,
    device=torch.device("cpu"),
    dtype=torch.float32,
    card=Card(flops=1e12, bandwidth=1e10),  # made up, so that every field is there
)


def find_card(name: str) -> Card | None:
    """The peaks of a card by its name; None where the table has none."""
    return next((card for part, card in CARDS.items() if part in name), None)


def measure(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All cells of all models."""
    on_gpu = options.device.type == "cuda"
    rows = []
    for model in options.models:
        policy = random_policy(MODELS[model], options.device, options.dtype)
        for name in options.cells:
            say(f"{model}, {name}")
            rows.append({"model": model, "cell": name, **_measure_cell(policy, MODELS[model].lora_rank, name, options)})
        del policy
        _free(options.device)
    return {
        "card": torch.cuda.get_device_name(options.device) if on_gpu else "CPU",
        "card_peak": None if options.card is None else asdict(options.card),
        "versions": versions(),
        "dtype": str(options.dtype).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tokens_per_microbatch": options.budget,
        "rows": rows,
    }


def _measure_cell(policy: Policy, lora_rank: int, name: str, options: Options) -> dict[str, Any]:
    cell = CELLS[name]
    groups = make_groups(policy, cell, options.groups)
    shape = decoder_shape(policy.family.checkpoint.config.get_text_config(), lora_rank)
    return {
        **asdict(cell),
        "groups": options.groups,
        "learners": _measure_learners(policy, groups, shape, options),
        "decoding": _measure_decoding(policy, groups, cell, options),
    }


def make_groups(policy: Policy, cell: Cell, count: int) -> list[AdvantageGroup]:
    """Groups of random tokens, each with a picture of its own."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for index in range(count):
        image = policy.family.encode_image(noise_image(cell.side, cell.side, seed=index))
        prompt = random_prompt(policy.family, cell.prompt_tokens, index, generator, image)
        groups.append(random_group(policy.family, prompt, cell.completion_tokens, cell.group_size, generator))
    return groups


def _measure_learners(
    policy: Policy, groups: Sequence[AdvantageGroup], shape: DecoderShape, options: Options
) -> dict[str, Any]:
    """Results by contender. Out of memory in the uncounted step takes a contender out of the race."""
    learners = {
        "tiercel": SharedLearner(policy, AUTO[options.device.type], groups, options.budget),
        "plain": PlainLearner(policy, groups, options.budget),
    }
    contenders = [
        Contender(
            name=name + (", checkpointed" if is_checkpointed else ""), learner=learner, is_checkpointed=is_checkpointed
        )
        for is_checkpointed in (False, True)
        for name, learner in learners.items()
    ]
    first = {each.name: run_step(policy, each, keep_gradient=True) for each in contenders}
    running = [each for each in contenders if first[each.name] is not None]
    steps: dict[str, list[Step | None]] = {each.name: [] for each in running}
    for _ in range(options.repetitions):
        for each in running:
            steps[each.name].append(run_step(policy, each))
    reference = next((step.gradient for name, step in first.items() if step and name.startswith("plain")), None)
    tokens = sum(len(row) for group in groups for row in group.sampler_logprobs)
    results: dict[str, Any] = {}
    for each in contenders:
        begun = first[each.name]
        counted = [step for step in steps.get(each.name, []) if step is not None]
        if begun is None or len(counted) < options.repetitions:
            results[each.name] = {"error": "out of memory"}
            continue
        summary = _summary(each, counted, tokens, shape, options.card)
        assert begun.gradient is not None
        summary["gradient_difference"] = None if reference is None else _difference(begun.gradient, reference)
        results[each.name] = summary
    return results


def _summary(
    contender: Contender, steps: Sequence[Step], tokens: int, shape: DecoderShape, card: Card | None
) -> dict[str, Any]:
    flops = contender.learner.flops(shape, contender.is_checkpointed)
    seconds = median(step.seconds for step in steps)
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    return {
        "error": None,
        "step_seconds": spread([step.seconds for step in steps]),
        "completion_tokens_per_second": rounded(tokens / seconds),
        "peak_bytes": max(peaks) if peaks else None,
        "flops": {**asdict(flops), "total": flops.total},
        "mfu": None if card is None else rounded(flops.total / seconds / card.flops),
    }


def run_step(policy: Policy, contender: Contender, keep_gradient: bool = False) -> Step | None:
    """One update; None where the card's memory does not hold it."""
    device = policy.device
    set_checkpointing(policy, contender.is_checkpointed)
    policy.model.zero_grad(set_to_none=True)
    _free(device)
    try:
        start = time.perf_counter()
        contender.learner.update()
        _finish(device)
        seconds = time.perf_counter() - start
    except torch.OutOfMemoryError:
        return None
    gradient = None
    if keep_gradient:
        parameters = policy.trained_parameters().values()
        gradient = torch.cat([parameter.grad.flatten().cpu() for parameter in parameters])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Step(seconds=seconds, peak_bytes=peak, gradient=gradient)


def _difference(found: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the reference's norm."""
    return rounded(float((found - reference).norm() / reference.norm()))


def _measure_decoding(policy: Policy, groups: Sequence[AdvantageGroup], cell: Cell, options: Options) -> dict[str, Any]:
    """Sampling with all rows alive to the end. A decode step is what the second half of the tokens takes; the start is
    what is left: prefill, and on CUDA the capture of the decoder's graph."""
    tokens = min(cell.completion_tokens, options.decode_tokens)
    sampler = LocalSampler(policy, VisionStore(policy, cache_bytes=0))  # features are there after the first run
    prompts = [group.item.prompt for group in groups]

    def run(new_tokens: int) -> float:
        params = SamplingParams(
            group_size=cell.group_size,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            stop=(),
            greedy=False,
        )
        _finish(options.device)
        start = time.perf_counter()
        sampler.sample(prompts, params, [1000 * index for index in range(len(prompts))])
        _finish(options.device)
        return time.perf_counter() - start

    run(tokens)
    half = tokens // 2
    pairs = [(run(half), run(tokens)) for _ in range(options.repetitions)]
    steps = [(whole - first) / (tokens - half) for first, whole in pairs]
    starts = [first - (half - 1) * step for (first, _), step in zip(pairs, steps, strict=True)]
    rows = len(prompts) * cell.group_size
    weight_bytes = decode_weight_bytes(policy)
    floor = None if options.card is None else weight_bytes / options.card.bandwidth
    return {
        "rows": rows,
        "new_tokens": tokens,
        "start_seconds": spread(starts),
        "step_seconds": spread(steps),
        "tokens_per_second": rounded(rows / median(steps)),
        "weight_bytes": weight_bytes,
        "floor_share": None if floor is None else rounded(floor / median(steps)),
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)


def markdown(results: dict[str, Any]) -> str:
    """A table of updates and one of decoding."""
    updates, decoding = [], []
    for row in results["rows"]:
        cell = f"{row['model']}, {row['prompt_tokens']}, {row['completion_tokens']}, {row['group_size']}"
        for name, learner in row["learners"].items():
            if learner["error"]:
                updates.append((f"{cell}, {name}", learner["error"], *["-"] * 5))
                continue
            peak = learner["peak_bytes"]
            updates.append(
                (
                    f"{cell}, {name}",
                    _spread(learner["step_seconds"]),
                    f"{learner['completion_tokens_per_second']:,.0f}",
                    "-" if peak is None else f"{peak / 2**30:.1f}",
                    f"{learner['flops']['total'] / 1e12:.4g}",
                    _share(learner["mfu"]),
                    "-" if learner["gradient_difference"] is None else f"{learner['gradient_difference']:.2g}",
                )
            )
        drawn = row["decoding"]
        decoding.append(
            (
                cell,
                str(drawn["rows"]),
                _spread(drawn["step_seconds"]),
                f"{drawn['tokens_per_second']:,.0f}",
                f"{drawn['weight_bytes'] / 1e9:.3g}",
                _share(drawn["floor_share"]),
            )
        )
    header = (
        "model, P, C, G, learner",
        "step, s",
        "completion tokens/s",
        "peak, GiB",
        "TFLOP",
        "MFU",
        "dgrad to plain",
    )
    update_table = markdown_table(header, updates)
    header = ("model, P, C, G", "rows", "decode step, s", "tokens/s", "weights, GB", "share of the bandwidth floor")
    groups = results["rows"][0]["groups"]
    return (
        f"{results['card']}, {results['dtype']}, {groups} groups a step; medians (min to max).\n\n"
        f"{update_table}\n{markdown_table(header, decoding)}"
    )


def _spread(value: dict[str, Any]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = [[name for name in names if name != "toy"] for names in (MODELS, CELLS)]
    parser.add_argument("--models", nargs="+", choices=real[0], default=real[0])
    parser.add_argument("--cells", nargs="+", choices=real[1], default=real[1])
    parser.add_argument("--groups", type=int, default=8, help="per step")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=64, help="new tokens of a decoding measurement, at most")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, in place of the table's")
    parser.add_argument("--bandwidth-gb", type=float, help="of the card's memory, GB/s, in place of the table's")
    parser.add_argument("--tf32", action="store_true", help="float32 products, such as LoRA's, in TF32")
    parser.add_argument("--toy", action="store_true", help="on CPU, in seconds")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/gpu.json")
    return parser.parse_args()


def options_of(arguments: argparse.Namespace) -> Options:
    """Raises SystemExit where there is no GPU, or only one number of an unknown card is given."""
    if arguments.toy:
        return TOY
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here; --toy runs on CPU")
    card = find_card(torch.cuda.get_device_name())
    if arguments.peak_tflops or arguments.bandwidth_gb:
        known = card or Card(flops=0.0, bandwidth=0.0)
        card = Card(
            flops=arguments.peak_tflops * 1e12 if arguments.peak_tflops else known.flops,
            bandwidth=arguments.bandwidth_gb * 1e9 if arguments.bandwidth_gb else known.bandwidth,
        )
        if not card.flops or not card.bandwidth:
            raise SystemExit("this card is not in the table; give both --peak-tflops and --bandwidth-gb")
    return Options(
        models=tuple(arguments.models),
        cells=tuple(arguments.cells),
        groups=arguments.groups,
        budget=arguments.budget,
        repetitions=arguments.repetitions,
        decode_tokens=arguments.decode_tokens,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        card=card,
    )


def main() -> None:
    arguments = parse()
    options = options_of(arguments)
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
    results = measure(options)
    text = markdown(results)
    print(text)
    file = arguments.results or (None if arguments.toy else RESULTS / "gpu.json")
    if file is not None:
        write_results(file, results, text)


if __name__ == "__main__":
    main()

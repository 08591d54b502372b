"""The cost of one more completion for the learner, depending on the length of the prompt and the size of the group.

    make bench-scaling
    python -m benchmarks.prompt_scaling --layers 2 --prompts 100 1000 4000 --repetitions 3

The model is a random Qwen2.5-VL-shaped decoder (512 wide, vocabulary 32,768, LoRA 16) in float32 on a CPU; a step is
the Learner's forward and backward pass over one group of text. All steps take turns within a repetition, so that a busy
machine slows them alike. A completion's cost is the difference between two steps of one repetition, divided by the
completions between them. The repeated form's cost is linear in its rows, so if a step would exceed --repeated-tokens,
it takes smaller groups. It runs only in the first --repeated-repetitions, because it is slow.

The cost of the shared form may grow with the prompt only through the attention to it. That shows in the ratio of
measured to modelled operations, and in the straight line through the costs: its intercept is a completion's cost
without its prompt, and its slope is the cost of attention to one token of the prompt.

P prompt tokens, C tokens of a completion, G completions of a group.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.flops import DecoderShape, Flops, decoder_shape, decoder_update, group_pairs, head_update
from benchmarks.peers import machine
from benchmarks.peers_report import rounded, spread
from benchmarks.random_groups import random_group, random_prompt
from benchmarks.shapes import save_checkpoint
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.config.schema import Data, Lora, Model, SftRecipe, Train
from tiercel.models.policy import Policy, build_policy
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackedTokens, pack

VOCABULARY = 32_768
LORA_RANK = 16
PAIR = (8, 16)  # group sizes whose difference gives a completion's cost
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to measure. Lengths are in tokens."""

    prompts: tuple[int, ...]
    group_sizes: tuple[int, ...]  # at `prompt`
    prompt: int
    completion: int
    repetitions: int
    repeated_repetitions: int  # the first ones, in which the repeated form takes its turns as well
    repeated_tokens: int  # largest step of the repeated form
    clock: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step to be timed."""

    form: str
    prompt: int
    group_size: int

    @property
    def label(self) -> str:
        return f"{self.form}, P {self.prompt}, G {self.group_size}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """The seconds of every step, one number for each repetition."""

    seconds: dict[Step, list[float]]

    def added(self, form: str, prompt: int, pair: tuple[int, int]) -> list[float]:
        """Return the seconds of one more completion for each repetition."""
        less, more = (self.seconds[Step(form=form, prompt=prompt, group_size=size)] for size in pair)
        return [(b - a) / (pair[1] - pair[0]) for a, b in zip(less, more, strict=True)]


def load_policy(checkpoint: Path) -> Policy:
    """Return the policy that a float32 recipe asks for."""
    recipe = SftRecipe(
        model=Model(path=str(checkpoint), dtype="float32"),
        lora=Lora(rank=LORA_RANK, alpha=2 * LORA_RANK),
        data=Data(train="rows.jsonl"),
        train=Train(steps=1),
        output="run",
    )
    return build_policy(recipe, torch.device("cpu"))


def repeated_pair(prompt: int, options: Options) -> tuple[int, int] | None:
    """Return the largest group sizes G / 2 and G, at most PAIR, whose steps are not too large for the repeated form."""
    less, more = PAIR
    while less >= 1:
        if more * (prompt + options.completion) <= options.repeated_tokens:
            return less, more
        less, more = less // 2, less
    return None


def steps_of(options: Options) -> list[Step]:
    """Return every step once."""
    steps = [Step(form="split", prompt=prompt, group_size=size) for prompt, sizes in _cells(options) for size in sizes]
    for prompt in options.prompts:
        pair = repeated_pair(prompt, options)
        steps += [Step(form="repeated", prompt=prompt, group_size=size) for size in pair or ()]
    for size in options.group_sizes:
        if size * (options.prompt + options.completion) <= options.repeated_tokens:
            steps.append(Step(form="repeated", prompt=options.prompt, group_size=size))
    return list(dict.fromkeys(steps))


def _cells(options: Options) -> Iterable[tuple[int, tuple[int, ...]]]:
    yield from ((prompt, PAIR) for prompt in options.prompts)
    yield options.prompt, options.group_sizes


def measure(policy: Policy, options: Options, say: Callable[[str], None] = print) -> Timings:
    """Time all steps in turn, after a step of each form that does not count."""
    learners = {form: PackedPolicy(policy, form, checkpointing=False).train() for form in ("split", "repeated")}
    steps = steps_of(options)
    batches = {step: _batch(policy, step, options.completion) for step in steps}
    for form in learners:
        first = next(step for step in steps if step.form == form)
        _seconds(policy, learners[form], batches[first], options.clock)
    seconds: dict[Step, list[float]] = {step: [] for step in steps}
    for number in range(options.repetitions):
        start = time.perf_counter()
        # Backwards every other time, so that no step always follows the same one.
        for step in steps if number % 2 == 0 else reversed(steps):
            if step.form == "split" or number < options.repeated_repetitions:
                seconds[step].append(_seconds(policy, learners[step.form], batches[step], options.clock))
        say(f"repetition {number + 1} of {options.repetitions}: {time.perf_counter() - start:.0f} s")
    return Timings(seconds=seconds)


def _batch(policy: Policy, step: Step, completion: int) -> PackedTokens:
    generator = torch.Generator().manual_seed(step.prompt)
    prompt = random_prompt(policy.family, step.prompt, 0, generator)
    return pack([random_group(policy.family, prompt, completion, step.group_size, generator).item])


def _seconds(policy: Policy, learner: PackedPolicy, batch: PackedTokens, clock: str) -> float:
    policy.model.zero_grad(set_to_none=True)
    now = CLOCKS[clock]
    start = now()
    (-learner(batch, None, 1.0).logprobs_N.mean()).backward()
    return now() - start


def modelled(shape: DecoderShape, prompt: int, completion: int, group_size: int) -> Flops:
    """Return the operations of a step of the shared form."""
    lengths = [completion] * group_size
    tokens = prompt + sum(lengths)
    return decoder_update(shape, tokens, group_pairs(prompt, lengths)) + head_update(shape, sum(lengths))


def added_flops(shape: DecoderShape, prompt: int, completion: int) -> Flops:
    """Return the operations of one more completion in the shared form."""
    one, two = (modelled(shape, prompt, completion, size) for size in (1, 2))
    return Flops(
        linear=two.linear - one.linear,
        lora=two.lora - one.lora,
        attention=two.attention - one.attention,
        head=two.head - one.head,
    )


def prompt_rows(timings: Timings, shape: DecoderShape, options: Options) -> list[dict[str, Any]]:
    """Return a completion's cost at each length of the prompt. `normalised` is seconds per modelled operation, relative
    to the shortest prompt."""
    rows: list[dict[str, Any]] = []
    for prompt in options.prompts:
        seconds = timings.added("split", prompt, PAIR)
        flops = added_flops(shape, prompt, options.completion)
        pair = repeated_pair(prompt, options)
        repeated = None if pair is None else timings.added("repeated", prompt, pair)
        row = {
            "P": prompt,
            "split_seconds": spread(seconds),
            "modelled_flops": {**asdict(flops), "total": flops.total},
            "flops_per_second": rounded(flops.total / median(seconds)),
            "repeated_group_sizes": pair,
            "repeated_seconds": None if repeated is None else spread(repeated),
            "repeated_ratio": None if repeated is None else rounded(median(repeated) / median(seconds)),
        }
        first = rows[0] if rows else row
        row["normalised"] = rounded(first["flops_per_second"] / row["flops_per_second"])
        rows.append(row)
    return rows


def straight_line(timings: Timings, shape: DecoderShape, options: Options) -> dict[str, float] | None:
    """Fit the median cost against P by least squares. Returns None with fewer than three prompts, through which a line
    says nothing. `largest_deviation` is that of a measured cost from the line, relative."""
    if len(options.prompts) < 3:
        return None
    costs = [median(timings.added("split", prompt, PAIR)) for prompt in options.prompts]
    slope, intercept = linear_regression(options.prompts, costs)
    deviations = [
        abs(intercept + slope * prompt - cost) / cost for prompt, cost in zip(options.prompts, costs, strict=True)
    ]
    ends = [added_flops(shape, prompt, options.completion).attention for prompt in (0, 1)]
    return {
        "intercept_seconds": rounded(intercept),
        "slope_seconds": rounded(slope),
        "attention_flops_per_second": rounded((ends[1] - ends[0]) / slope),
        "largest_deviation": rounded(max(deviations)),
    }


def group_rows(timings: Timings, shape: DecoderShape, options: Options) -> list[dict[str, Any]]:
    """Return the seconds of a step against G, and what is modelled."""
    rows = []
    for size in options.group_sizes:
        split = timings.seconds[Step(form="split", prompt=options.prompt, group_size=size)]
        repeated = timings.seconds.get(Step(form="repeated", prompt=options.prompt, group_size=size))
        flops = modelled(shape, options.prompt, options.completion, size)
        rows.append(
            {
                "G": size,
                "split_seconds": spread(split),
                "modelled_flops": flops.total,
                "flops_per_second": rounded(flops.total / median(split)),
                "repeated_seconds": None if repeated is None else spread(repeated),
                "repeated_ratio": None if repeated is None else rounded(median(repeated) / median(split)),
            }
        )
    return rows


def markdown(results: dict[str, Any]) -> str:
    """Return costs against P, the line through them, and step times against G."""
    shape = results["shape"]
    by_prompt = markdown_table(
        (
            "P",
            "one more completion, ms",
            "modelled, GFLOP (linear and LoRA + head + attention)",
            "GFLOP/s",
            f"measured / modelled, P = {results['by_prompt'][0]['P']} as 1",
            "repeated form, ms",
            "repeated / split",
        ),
        [_prompt_cells(row) for row in results["by_prompt"]],
    )
    by_group = markdown_table(
        ("G", "step, s", "modelled, GFLOP", "GFLOP/s", "repeated form, s", "repeated / split"),
        [
            (
                str(row["G"]),
                _spread(row["split_seconds"], 1),
                f"{row['modelled_flops'] / 1e9:.1f}",
                f"{row['flops_per_second'] / 1e9:.1f}",
                _spread(row["repeated_seconds"], 1),
                _ratio(row["repeated_ratio"]),
            )
            for row in results["by_group"]
        ],
    )
    text = (
        f"{shape['layers']} layers of {shape['hidden']}, vocabulary {shape['vocabulary']:,}, "
        f"C = {results['completion']}, float32, {results['threads']} thread(s), {results['clock']} clock, load "
        f"{results['load']:.1f} before; medians (min to max) of {results['repetitions']} repetitions, of the repeated "
        f"form {results['repeated_repetitions']}.\n\n{by_prompt}"
    )
    if line := results["line"]:
        text += (
            f"\nThe line through the costs: {line['intercept_seconds'] * 1e3:.1f} ms without the prompt, "
            f"{line['slope_seconds'] * 1e6:.2f} microseconds for each of its tokens, which is attention at "
            f"{line['attention_flops_per_second'] / 1e9:.1f} GFLOP/s; no cost is further than "
            f"{line['largest_deviation']:.1%} from it.\n"
        )
    return f"{text}\nP = {results['prompt']}:\n\n{by_group}"


def _prompt_cells(row: dict[str, Any]) -> tuple[str, ...]:
    flops = row["modelled_flops"]
    parts = (flops["linear"] + flops["lora"], flops["head"], flops["attention"])
    return (
        str(row["P"]),
        _spread(row["split_seconds"], 1e3),
        f"{flops['total'] / 1e9:.2f} ({' + '.join(f'{part / 1e9:.2f}' for part in parts)})",
        f"{row['flops_per_second'] / 1e9:.1f}",
        f"{row['normalised']:.2f}",
        _spread(row["repeated_seconds"], 1e3),
        _ratio(row["repeated_ratio"]),
    )


def _spread(value: dict[str, Any] | None, factor: float) -> str:
    if value is None:
        return "-"
    middle, low, high = (value[key] * factor for key in ("median", "min", "max"))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 280, 1000, 2000, 4000], help="P")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="G, at --prompt")
    parser.add_argument("--prompt", type=int, default=280)
    parser.add_argument("--completion", type=int, default=64, help="C")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--repeated-repetitions", type=int, default=2, help="in which the repeated form runs as well")
    parser.add_argument("--repeated-tokens", type=int, default=8200, help="largest step of the repeated form")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--results", type=Path, default=RESULTS / "prompt_scaling.json")
    arguments = parser.parse_args()
    if not 1 <= arguments.repeated_repetitions <= arguments.repetitions:
        parser.error("--repeated-repetitions must be from 1 to --repetitions")
    return arguments


def main() -> None:
    arguments = parse()
    load = os.getloadavg()[0]
    logging.disable_progress_bar()
    options = Options(
        prompts=tuple(arguments.prompts),
        group_sizes=tuple(arguments.group_sizes),
        prompt=arguments.prompt,
        completion=arguments.completion,
        repetitions=arguments.repetitions,
        repeated_repetitions=arguments.repeated_repetitions,
        repeated_tokens=arguments.repeated_tokens,
        clock=arguments.clock,
    )
    with TemporaryDirectory() as directory:
        save_checkpoint(Path(directory), VOCABULARY, arguments.layers)
        policy = load_policy(Path(directory))
    shape = decoder_shape(policy.family.checkpoint.config.get_text_config(), LORA_RANK)
    timings = measure(policy, options)
    results = {
        "machine": machine(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "load": load,
        "shape": asdict(shape),
        **asdict(options),
        "by_prompt": prompt_rows(timings, shape, options),
        "line": straight_line(timings, shape, options),
        "by_group": group_rows(timings, shape, options),
    }
    text = markdown(results)
    print(text)
    write_results(arguments.results, results, text)


if __name__ == "__main__":
    main()

"""The cost of a user reward's process per completion, in addition to the reward itself.

    python -m benchmarks.reward_overhead --completions 16 128 1024 --rounds 30

Measured are a reward that does next to nothing, called for each sample, async, and for the whole batch, in its own
process, and the same function called in this process. All take turns within a round, and the first round does not
count. A cost is a batch's time divided by its completions; the start of a process is measured separately. Completions
have 500 characters, and rows have three columns. Writes benchmarks/results/reward_overhead.json and .md.
"""

import argparse
import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers import machine
from benchmarks.peers_report import rounded, spread
from benchmarks.tables import RESULTS, markdown_table, write_results
from tiercel.config.schema import Reliability
from tiercel.reward_types import RewardValue, Sample, SampleImage
from tiercel.rewards.runtime.user import UserReward

SOURCE = textwrap.dedent(
    """
    def each(sample):
        return float(len(sample.completion))


    async def awaited(sample):
        return float(len(sample.completion))


    def batch(samples):
        return [float(len(sample.completion)) for sample in samples]


    batch.batched = True
    """
)
FUNCTIONS = {"each": "a call per sample", "awaited": "async", "batch": "batched"}
IN_PROCESS = "in this process"


def sample(number: int, characters: int = 500) -> Sample:
    """Return a completion as a step has it."""
    return Sample(
        id=f"rows:{number}",
        prompt="<image>Where is the 7? " * 5,
        completion=f"{number} ".ljust(characters, "x"),
        token_count=characters // 4,
        is_truncated=False,
        answer=[12, 30, 45, 60],
        columns={"level": 2, "kind": "digits", "source": "made up"},
        images=(SampleImage(path="a.png", original_size=(640, 480), processed_size=(644, 476)),),
        coordinate_space="resized_pixels",
    )


def in_process(samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
    """Return what the process would answer, without the process."""
    return tuple(RewardValue(value=float(len(each.completion))) for each in samples)


def measure(counts: Sequence[int], rounds: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the microseconds per completion for each way and number of completions, and the seconds to start a
    process."""
    starts: list[float] = []
    ways: dict[str, Callable[[Sequence[Sample]], tuple[RewardValue, ...]]] = {IN_PROCESS: in_process}
    with TemporaryDirectory() as directory, ExitStack() as stack:
        file = Path(directory) / "trivial.py"
        file.write_text(SOURCE, encoding="utf-8")
        for function, way in FUNCTIONS.items():
            reward = UserReward(f"{file}:{function}", Reliability())
            stack.callback(reward.close)
            start = time.perf_counter()
            reward.start()
            starts.append(time.perf_counter() - start)
            ways[way] = reward.score
        return [
            {"completions": count, "way": way, "microseconds": spread(values)}
            for count in counts
            for way, values in _microseconds(ways, count, rounds).items()
        ], starts


def _microseconds(
    ways: Mapping[str, Callable[[Sequence[Sample]], tuple[RewardValue, ...]]], count: int, rounds: int
) -> dict[str, list[float]]:
    samples = [sample(number) for number in range(count)]
    expected = in_process(samples)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, score in ways.items():
            start = time.perf_counter()
            values = score(samples)
            taken[way].append((time.perf_counter() - start) / count * 1e6)
            if values != expected:
                raise SystemExit(f"{way}: wrong values, {next(value for value in values if value not in expected)}")
    return {way: values[1:] for way, values in taken.items()}


def markdown(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each number of completions and a column for each way."""
    ways = [IN_PROCESS, *FUNCTIONS.values()]
    cells = {(row["completions"], row["way"]): row["microseconds"] for row in results["rows"]}
    counts = sorted({count for count, _ in cells})
    table = markdown_table(
        ("completions of a batch", *ways),
        [(f"{count:,}", *(_shown(cells[count, way]) for way in ways)) for count in counts],
    )
    start = results["start_seconds"]
    return (
        f"Microseconds per completion, median (min to max) of {results['rounds']} rounds; load {results['load']:.1f} "
        f"before. To start a process, once a run: {start['median']:.2f} s ({start['min']:.2f} to {start['max']:.2f})."
        f"\n\n{table}"
    )


def _shown(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS / "reward_overhead.json")
    options = parser.parse_args()
    load = rounded(os.getloadavg()[0])
    rows, starts = measure(options.completions, options.rounds)
    results = {
        "machine": machine(),
        "load": load,
        "rounds": options.rounds,
        "rows": rows,
        "start_seconds": spread(starts),
    }
    write_results(options.output, results, markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()

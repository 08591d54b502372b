"""From which length a shared beginning is worth a node of its own: rows joined against the same rows apart.

    python -m benchmarks.shared_length

Forward and backward passes of the learner in turn, over rows that begin with the same words, with two threads (8 layers
512 wide, vocabulary 8k, float32, LoRA 16). A cut pays from the shortest length at which the rows joined are faster in
most rounds, there and at all greater lengths. That is what `SHORTEST` in `tiercel/packing/sharing.py` stands for. Takes
a few minutes; writes benchmarks/results/shared_length.json and .md.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.drivers.learner_step import TEXT_IDS, make_policy
from benchmarks.peers import machine
from benchmarks.random_trees import row_of, short_pieces_shared
from benchmarks.shapes import SHAPES
from benchmarks.tables import RESULTS, markdown_table, write_results
from tiercel.models.policy import Policy
from tiercel.packing.batch import prompt_of_no_row
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackedTokens, pack

LENGTHS = (4, 8, 16, 24, 32, 48, 64, 96, 128)
OWN, COMPLETION = 64, 32  # tokens of each row after the shared ones


def packs(policy: Policy, shared: int, count: int) -> tuple[PackedTokens, PackedTokens]:
    """Pack rows with random words, joined and apart."""
    generator = torch.Generator().manual_seed(0)

    def words(length: int) -> torch.Tensor:
        return torch.randint(TEXT_IDS, (length,), generator=generator)

    ids_P = words(shared)
    start = prompt_of_no_row(ids_P, policy.family.positions(ids_P, []))
    rows = [row_of(start, index, words(OWN), [words(COMPLETION)]) for index in range(count)]
    with short_pieces_shared(shared):
        return pack(rows, policy.family), pack(rows)


def ratios(learner: PackedPolicy, both: tuple[PackedTokens, PackedTokens], rounds: int) -> list[float]:
    """Return, for each round, how many times as long the rows take apart."""
    found = []
    for number in range(rounds + 1):
        seconds = []
        for packed in both[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            learner(packed, None, 1.0).logprobs_N.sum().backward()
            seconds.append(time.perf_counter() - start)
        joined, apart = seconds[:: 1 if number % 2 else -1]
        found.append(apart / joined)
    return found[1:]  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        SHAPES["qwen2_5_vl"].save(Path(directory) / "model", 8192, 8)
        policy = make_policy(Path(directory) / "model")
    learner, lines, found = PackedPolicy(policy, "split", False), [], {}
    for count in options.rows:
        by_length = {shared: ratios(learner, packs(policy, shared, count), options.rounds) for shared in LENGTHS}
        slower = [shared for shared, rounds in by_length.items() if statistics.median(rounds) <= 1]
        pays = [shared for shared in LENGTHS if shared > max(slower, default=0)]
        found[str(count)] = {"pays_from": min(pays, default=None), "ratios": by_length}
        for shared, rounds in by_length.items():
            spread = f"{statistics.median(rounds):.3f} ({min(rounds):.3f} to {max(rounds):.3f})"
            lines.append([str(count), str(shared), spread, "yes" if shared in pays else "no"])
        print(f"{count} rows: a cut pays from {found[str(count)]['pays_from']} shared tokens", flush=True)
    text = markdown_table(["rows", "shared tokens", "time apart over joined, median (rounds)", "pays"], lines)
    write_results(RESULTS / "shared_length.json", {"machine": machine(), "rows": found}, text)
    print(text)


if __name__ == "__main__":
    main()

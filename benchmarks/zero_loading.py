"""What a rank holds in memory while DeepSpeed's ZeRO-3 takes over a model.

    python -m benchmarks.zero_loading --layers 84

CPU ranks load a checkpoint in Qwen2.5-VL's format with random weights in float32 as a training run loads it, with an
adapter. `whole`: DeepSpeed is given the whole model, as tiercel did before it partitioned the parameters one by one. A
process's file memory is pages of the checkpoint, which all ranks share and the system may take back. Its own memory is
what counts on a machine, and what the device would hold. The peak of the own memory is polled.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import RESULTS, markdown_table, versions, write_results

POLL_SECONDS = 0.005
VARIANTS = ("whole", "partitioned")
FIELDS = {"RssAnon": "own", "RssFile": "file", "VmHWM": "peak"}


def memory() -> dict[str, int]:
    """Return the bytes of this process: its own, those of mapped files, and the peak of both together."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(":") for line in lines)
    return {FIELDS[name]: 1024 * int(value.split()[0]) for name, value in pairs if name in FIELDS}


class OwnPeak(threading.Thread):
    """Polls the own memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._is_done = threading.Event()

    def run(self) -> None:
        while not self._is_done.wait(POLL_SECONDS):
            self.bytes = max(self.bytes, memory()["own"])

    def stop(self) -> int:
        self._is_done.set()
        self.join()
        return self.bytes


def rank_main(checkpoint: Path, strategy: str, variant: str, out: Path) -> None:
    """Build the trainer on this rank and write what it took."""
    import torch

    from tiercel.config.schema import Data, Lora, Model, SftRecipe, Train
    from tiercel.distributed.ranks import joined_ranks
    from tiercel.distributed.strategies import zero
    from tiercel.reliability.heartbeat import Heartbeat
    from tiercel.training.trainer import build_trainer

    torch.set_num_threads(1)
    if variant == "whole":
        zero._partition = lambda *arguments: None  # type: ignore[assignment]
    recipe = SftRecipe(
        model=Model(path=str(checkpoint), dtype="float32"),
        lora=Lora(rank=8, alpha=16),
        data=Data(train="unused.jsonl"),
        train=Train(steps=1, strategy=strategy),  # type: ignore[arg-type]
        output="unused",
    )
    with joined_ranks(600.0, Heartbeat(int(os.environ["RANK"]))) as ranks:
        before, polled, started = memory(), OwnPeak(), time.perf_counter()
        polled.start()
        trainer = build_trainer(recipe, ranks=ranks)
        seconds, peak = time.perf_counter() - started, polled.stop()
        after = memory()
        weights = trainer.policy.model.parameters()
        found = {
            "parameters": sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights),
            "before_bytes": before["own"],
            "own_peak_bytes": peak,
            "own_after_bytes": after["own"],
            "file_bytes": after["file"],
            "peak_bytes": after["peak"],
            "seconds": seconds,
        }
        for rank, each in enumerate(ranks.all_gather(found)):
            if ranks.is_first:
                (out / f"{rank}.json").write_text(json.dumps(each), encoding="utf-8")


def measure(checkpoint: Path, strategy: str, variant: str, count: int) -> list[dict[str, Any]]:
    """Return what each rank took, by rank."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command += ["-m", "benchmarks.zero_loading", "--rank-of", str(checkpoint), "--strategy", strategy]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run([*command, "--variant", variant, "--out", folder], env=environment, check=True)
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table with one row for each rank of each variant, in GB."""
    header = ("", "rank", "own peak", "own after", "of files", "peak of both", "seconds")
    rows = []
    for name, ranks in found.items():
        for number, each in enumerate(ranks):
            keys = ("own_peak_bytes", "own_after_bytes", "file_bytes", "peak_bytes")
            rows.append([name, str(number), *(f"{each[key] / 1e9:.2f}" for key in keys), f"{each['seconds']:.1f}"])
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=84)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", type=Path, help="used by the ranks that this program starts")
    parser.add_argument("--strategy", default="deepspeed")
    parser.add_argument("--variant", choices=VARIANTS, default="partitioned")
    parser.add_argument("--out", type=Path, default=RESULTS / "zero_loading.json")
    options = parser.parse_args()
    if options.rank_of is not None:
        rank_main(options.rank_of, options.strategy, options.variant, options.out)
        return
    from benchmarks.peers import machine
    from benchmarks.shapes import save_checkpoint

    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        save_checkpoint(checkpoint, options.vocabulary, options.layers)
        found = {f"deepspeed, {each}": measure(checkpoint, "deepspeed", each, options.ranks) for each in VARIANTS}
        found["fsdp2"] = measure(checkpoint, "fsdp2", "partitioned", options.ranks)
    parameters = found["fsdp2"][0]["parameters"]
    title = f"{parameters / 1e6:.0f} million parameters, float32, {options.ranks} CPU ranks; GB of a rank.\n\n"
    results = {"machine": machine(), "versions": versions(), "found": found}
    write_results(options.out, results, title + table(found))
    print(title + table(found))


if __name__ == "__main__":
    main()

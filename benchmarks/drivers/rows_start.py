"""One start with rows: a process that reads them as a run does, or as TRL does by `datasets`, and draws 4,096 of them.

It is started by benchmarks.rows, several times at once for several ranks. It says when its modules are there, waits for
a line, reads, says what it found, and stays until its input ends, so that memory can be measured meanwhile.
"""

import argparse
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.drivers.measuring import answer_stream

DRAWN = 4096
HELD_OUT = 64


def by_tiercel(given: argparse.Namespace, held: list[Any]) -> Callable[[], dict[str, Any]]:
    """Return what reads rows, takes their identity and draws rows in the order of a run. What it reads goes into
    `held`."""
    from tiercel.config.data import Data
    from tiercel.data import reading, row_table

    if given.in_memory:
        reading.MOST_HELD_BYTES = 1 << 62
    data = Data(train=given.rows, eval={"count": HELD_OUT}, cache=str(given.cache))

    def start() -> dict[str, Any]:
        began = time.perf_counter()
        read = reading.read_run_rows(data, "sft")
        held.append(read)
        table = read.train
        identity, *_ = [each.identity() for each in read.tables]
        order = table.order(0, data)
        held.append(order)
        ready = time.perf_counter()
        drawn = [table.rows[order.row(index)].id for index in range(min(DRAWN, len(table.rows)))]
        same = [identity["sha256"], identity[row_table.CONTENT], drawn[-1]]
        return {"rows": sum(len(each.rows) for each in read.tables), "same": same, **_seconds(began, ready, len(drawn))}

    return start


def by_datasets(given: argparse.Namespace, held: list[Any]) -> Callable[[], dict[str, Any]]:
    """Return what loads rows as a script of TRL does, and draws as many rows at random."""
    import datasets

    datasets.disable_progress_bars()
    kinds = {".jsonl": "json", ".parquet": "parquet", ".tar": "webdataset"}

    def start() -> dict[str, Any]:
        began = time.perf_counter()
        files = [str(file) for file in sorted(Path(given.rows).parent.glob(Path(given.rows).name))][: given.files]
        kind = kinds[Path(files[0]).suffix]
        loaded = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(given.cache))
        for name, feature in loaded.features.items():
            if isinstance(feature, datasets.Image):  # as bytes, as tiercel's rows have them
                loaded = loaded.cast_column(name, datasets.Image(decode=False))
        held.append(loaded)
        ready = time.perf_counter()
        places = random.Random(0).choices(range(len(loaded)), k=DRAWN)
        for place in places:
            loaded[place]
        return {"rows": len(loaded), **_seconds(began, ready, len(places))}

    return start


def _seconds(began: float, ready: float, drawn: int) -> dict[str, float]:
    return {
        "seconds": round(ready - began, 2),
        "draw_ms": round((time.perf_counter() - ready) / drawn * 1000, 3),
        "processor_seconds": round(sum(os.times()[:4]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("tiercel", "datasets"), required=True)
    parser.add_argument("--rows", required=True, help="a file, or a pattern of files")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--files", type=int, help="read only so many files")
    parser.add_argument("--in-memory", action="store_true", help="hold the rows, without an index")
    given = parser.parse_args()
    held: list[Any] = []  # while memory is measured
    with answer_stream() as stream:
        start = {"tiercel": by_tiercel, "datasets": by_datasets}[given.by](given, held)
        for answer in (dict, start):
            stream.write(json.dumps(answer() | {"peak_MB": _peak()}) + "\n")
            stream.flush()
            input()


def _peak() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


if __name__ == "__main__":
    main()

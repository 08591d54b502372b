"""Start with a large file of rows: rows held in memory, the first start of an index, the second one, side by side.

    python -m benchmarks.rows --rows 1000000 [--folder DIR]    JSON Lines
    python -m benchmarks.rows --rows 5000 --pictures           Parquet with a picture of 197 kB in each row

Each start is a process of its own that reads the rows as a run does, takes their identity and draws 4,096 rows in the
order of a run. Seconds are wall time, and processors' time with that of children; `own_MB` is what the rows add to the
memory of a rank, without the pages of mapped files, which processes share. Writes benchmarks/results/rows.json and
rows.md, or rows_pictures: memory, not seconds, because other work may run on the machine.
"""

import argparse
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS, markdown_table, write_results

WORDS = [f"word-{number}" for number in range(23)]
DRAWN = 4096


def write_rows(file: Path, count: int) -> None:
    """Write rows of about 370 bytes, each with a picture's name, a question and an answer."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question, answer = (" ".join(draw.choices(WORDS, k=words)) for words in (25, 12))
            turns = [("user", f"<image>{question}"), ("assistant", answer)]
            row = {
                "id": f"rec-{number}",
                "images": [f"train/{draw.randrange(count // 4 + 1):08d}.jpg"],
                "answer": [draw.randrange(500) for _ in range(4)],
                "task": draw.choice(["rec", "ocr"]),
                "messages": [{"role": role, "content": text} for role, text in turns],
            }
            stream.write(json.dumps(row) + "\n")


def write_pictures(file: Path, count: int) -> None:
    """Write Parquet rows of one of 50 pictures each, in row groups of 100 rows, as datasets writes them."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    draw, pictures = random.Random(0), []
    for _ in range(50):
        stream = io.BytesIO()
        Image.frombytes("RGB", (256, 256), draw.randbytes(3 << 16)).save(stream, "PNG")
        pictures.append(stream.getvalue())
    writer = None
    for first in range(0, count, 100):
        rows = [
            {
                "id": f"rec-{number}",
                "images": [{"bytes": draw.choice(pictures), "path": None}],
                "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a word"}],
            }
            for number in range(first, min(first + 100, count))
        ]
        table = pyarrow.Table.from_pylist(rows)
        writer = writer or parquet.ParquetWriter(file, table.schema, use_dictionary=False)
        writer.write_table(table)
    assert writer is not None, "no rows"
    writer.close()


def start(rows: str, cache: str, way: str) -> dict[str, object]:
    """Read the rows once, in this process."""
    from tiercel.config.data import Data
    from tiercel.data import reading

    before = own_memory()
    if way == "memory":
        reading.MOST_HELD_BYTES = 1 << 62
    began = time.perf_counter()
    data = Data(train=rows, cache=cache)
    table = reading.read_run_rows(data, "sft").train
    read = time.perf_counter() - began
    identity = table.identity()
    ready = time.perf_counter() - began
    order = table.order(0, data)
    drawn = [table.rows[order.row(index)].id for index in range(DRAWN)]
    return {
        "way": way,
        "rows": len(table.rows),
        "read_seconds": round(read, 2),
        "start_seconds": round(ready, 2),
        "processor_seconds": round(sum(os.times()[:4]), 1),
        "draw_ms_per_row": round((time.perf_counter() - began - ready) / DRAWN * 1000, 4),
        "own_MB": round((own_memory() - before) / 1e6),
        "peak_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "same": [identity["sha256"], identity["content"], drawn[-1]],
    }


def own_memory() -> int:
    """Return the bytes of this process that are not pages of a mapped file."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def main() -> None:
    """Write the rows and start three times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        print(json.dumps(start(*given.start)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = Path(folder) / ("rows.parquet" if given.pictures else "rows.jsonl")
        (write_pictures if given.pictures else write_rows)(rows, given.rows)
        found = []
        for way in ("memory", "first", "second"):
            command = [sys.executable, "-m", "benchmarks.rows", "--start", str(rows), str(Path(folder) / "cache"), way]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout))
            print(json.dumps(found[-1]), flush=True)
        assert all(each["same"] == found[0]["same"] for each in found), "the ways differ"
        index = sum(file.stat().st_size for file in Path(folder).glob("cache/rows/*/*"))
        size, has = rows.stat().st_size, index / found[0]["rows"]
        print(f"the index has {has:.0f} bytes a row; the file {size:,} bytes")
        figures = [{name: each[name] for name in ("way", "rows", "own_MB", "peak_MB")} for each in found]
        results = {"starts": figures, "index_bytes_a_row": round(has), "file_bytes": size}
        name = "rows_pictures.json" if given.pictures else "rows.json"
        write_results(RESULTS / name, results, table(results))


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    names = {"memory": "rows held in memory", "first": "first start of the index", "second": "second start"}
    rows = [[names[each["way"]], f"{each['own_MB']:,} MB", f"{each['peak_MB']:,} MB"] for each in results["starts"]]
    said = f"{results['starts'][0]['rows']:,} rows, {results['file_bytes'] / 1e6:,.0f} MB; "
    said += f"the index has {results['index_bytes_a_row']} bytes a row.\n\n"
    return said + markdown_table(["", "memory of the rows in a rank", "peak of the process"], rows)


if __name__ == "__main__":
    main()

"""Start with many rows: held in memory, at the first start of an index, at the next, in four ranks at once, and by
`datasets` as TRL's scripts load them; then `tiercel check`, and `tiercel sft` up to the end of its first step.

    python -m benchmarks.rows --part jsonl --rows 10000000
    python -m benchmarks.rows --part tar --rows 100000          1,000 shards of 100 rows
    python -m benchmarks.rows --part parquet --gigabytes 40     rows with a picture of 197 kB each
    python -m benchmarks.rows --part jsonl --rows 10000000 --ways second four check --folder DIR

Each start is a process of its own that reads the rows, takes their identity and draws 4,096 in the order of a run. All
ways of tiercel must give the same rows, hashes and order. With --folder, the files are made there once and stay; else
they are removed. Parquet is made as large as the free disk allows, and `datasets`, which copies all rows, gets as many
of the files as it has room for. Each figure is written into benchmarks/results/rows.json and rows.md when it is there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.drivers.rows_start import HELD_OUT
from benchmarks.made_rows import BYTES_OF_A_PICTURE, ROWS_A_SHARD, write_lines, write_parquet, write_shards
from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, write_results

WAYS = {
    "memory": "rows held in memory",
    "first": "first start, which makes the index",
    "second": "second start",
    "four": "second start of four ranks at once",
    "datasets_first": "`datasets`, first load",
    "datasets_second": "`datasets`, second load",
    "datasets_four": "`datasets`, second load of four ranks at once",
    "check": "`tiercel check`",
    "step": "`tiercel sft`, to the end of its first step",
    "step_of_64": "the same with 64 rows",
}
FREE_BYTES = 5_000_000_000  # of the disk, which are left free
HELD_FACTOR = 5  # rows held in memory, at their peak, in bytes of their file
RANKS = 4
Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of files."""

    title: str
    rows: int  # by default
    pattern: str
    write: Callable[[Path, int], None]


PARTS = {
    "jsonl": Part(title="JSON Lines", rows=200_000, pattern="rows.jsonl", write=write_lines),
    "tar": Part(title="tar shards", rows=50 * ROWS_A_SHARD, pattern="*.tar", write=write_shards),
    "parquet": Part(title="Parquet with pictures", rows=5000, pattern="*.parquet", write=write_parquet),
}


def main() -> None:
    """Make the files and measure each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="jsonl")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--gigabytes", type=float, help="of Parquet, in place of --rows")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", type=Path, help="for the files, which stay there")
    parser.add_argument("--out", type=Path, default=RESULTS / "rows.json")
    given = parser.parse_args()
    part = PARTS[given.part]
    with TemporaryDirectory() as temporary:
        place = (given.folder or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        wanted = given.rows or part.rows
        if given.gigabytes:
            wanted = round(given.gigabytes * 1e9 / BYTES_OF_A_PICTURE)
        count = wanted
        if given.part == "parquet" and not (place / f"parquet-{wanted}").exists():
            count = min(wanted, max(1, _room(place) // BYTES_OF_A_PICTURE))
        made = _made(place / f"{given.part}-{count}", part, count)
        files = sorted(made.glob(part.pattern))
        found = {"machine": machine(), "rows": count, "files": len(files), "bytes": sum(map(_size, files))}
        found |= {"wanted": wanted, "ways": {}}
        for way, figures in measured(made, part, given.ways):
            found["ways"][way] = {**figures, "load": round(os.getloadavg()[0], 1)}
            found["index_bytes"] = sum(_size(file) for file in made.glob("cache/rows/*.index"))
            print(way, json.dumps(found["ways"][way]), flush=True)
            _write(given.out, given.part, found)


def _size(file: Path) -> int:
    return file.stat().st_size


def _room(place: Path) -> int:
    return shutil.disk_usage(place).free - FREE_BYTES


def _made(folder: Path, part: Part, count: int) -> Path:
    """Write the files, unless they are there."""
    if not folder.exists():
        new = folder.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        part.write(new, count)
        new.rename(folder)
    return folder


def _write(out: Path, part: str, found: Results) -> None:
    """Write what was measured so far. Figures of other parts stay; those of this part stay if they are of as many
    rows."""
    every = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    before = every.get(part, {})
    if (before.get("rows"), before.get("machine")) == (found["rows"], found["machine"]):
        found = {**found, "ways": {**before["ways"], **found["ways"]}}
    every[part] = found
    write_results(out, every, table(every))


def measured(made: Path, part: Part, ways: Sequence[str]) -> Iterator[tuple[str, Results]]:
    """Yield what each way takes, in the order of WAYS."""
    rows, same = str(made / part.pattern), None
    for way in (each for each in WAYS if each in ways):
        if way in ("check", "step", "step_of_64"):
            yield way, _command(made, rows, way)
            continue
        if way.startswith("datasets"):
            found = _by_datasets(made, rows, way)
        elif way == "memory" and sum(map(_size, made.glob(part.pattern))) * HELD_FACTOR > _free_memory():
            found = {"left_out": "they need more memory than is free"}
        else:
            if way == "first":
                shutil.rmtree(made / "cache", ignore_errors=True)
            words = ["--by", "tiercel", "--rows", rows, "--cache", str(made / "cache")]
            found = start([*words, *(["--in-memory"] if way == "memory" else [])], RANKS if way == "four" else 1)
        these = found.pop("same", None)
        same = same or these
        assert these is None or these == same, "the ways differ"
        yield way, found


def _by_datasets(made: Path, rows: str, way: str) -> Results:
    """Measure datasets on as many of the files as its copy has room for."""
    cache = made / "datasets"
    if way == "datasets_first":
        shutil.rmtree(cache, ignore_errors=True)
    record = made / "datasets-files"
    if not cache.exists():
        files = sorted(made.glob(Path(rows).name))
        record.write_text(str(min(len(files), max(1, _room(made) * len(files) // sum(map(_size, files))))))
    words = ["--by", "datasets", "--rows", rows, "--cache", str(cache), "--files", record.read_text()]
    return start(words, RANKS if way == "datasets_four" else 1)


def _free_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def start(words: Sequence[str], ranks: int) -> Results:
    """Start processes that read rows at the same time. Memory is that of the rank that has the most: what is its own,
    and its share of what processes have together, each more than before it read."""
    command = [sys.executable, "-m", "benchmarks.drivers.rows_start", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:
        every = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
            for _ in range(ranks)
        ]
        stack.callback(lambda: [process.kill() for process in every])
        _answers(every)
        before = [_memory(process.pid) for process in every]
        _go_on(every)
        answers = _answers(every)
        after = [_memory(process.pid) for process in every]
        _go_on(every)
    own, shared = (
        max(then[kind] - now[kind] for now, then in zip(before, after, strict=True)) for kind in ("own", "share")
    )
    most = {name: max(each[name] for each in answers) for name in ("seconds", "draw_ms", "peak_MB")}
    used = round(sum(each["processor_seconds"] for each in answers), 1)
    memory = {"own_MB": round(own / 1e6), "share_MB": round(shared / 1e6)}
    return {**answers[0], **most, "processor_seconds": used, **memory}


def _answers(every: Sequence[subprocess.Popen]) -> list[Results]:
    return [json.loads(process.stdout.readline()) for process in every if process.stdout is not None]


def _go_on(every: Sequence[subprocess.Popen]) -> None:
    for process in every:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def _memory(pid: int) -> dict[str, int]:
    """Return the bytes that are a process's own, and these with its share of the pages of mapped files."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()]
    sizes = {words[0]: 1024 * int(words[1]) for words in lines if words[0] in ("Pss:", "Anonymous:")}
    return {"own": sizes["Anonymous:"], "share": sizes["Pss:"]}


def _command(made: Path, rows: str, way: str) -> Results:
    """Run a command of tiercel; return the seconds, of a run those to the end of its first step, and the most memory
    of one of its processes."""
    from tests.tiny_models import save_tiny_checkpoint

    if not (model := made / "model").exists():
        save_tiny_checkpoint("qwen2_5_vl", model)
    if way == "step_of_64":
        rows = str(_few(made, rows))
    recipe = {
        "model": {"path": str(model), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": rows, "eval": {"count": HELD_OUT}, "cache": str(made / "cache"), "workers": 1},
        "optim": {"prompts_per_step": 8},
        "train": {"steps": 1, "threads": 1},
        "output": str(made / "run"),
    }
    shutil.rmtree(made / "run", ignore_errors=True)
    (made / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    words = ["check" if way == "check" else "sft", str(made / "recipe.yaml")]
    began = time.perf_counter()
    with _running([sys.executable, "-m", "tiercel", *words], made) as process:
        seconds = None
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if seconds is None and _has_step(made / "run" / "metrics.jsonl"):
                seconds = time.perf_counter() - began
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
    assert process.returncode == 0, (made / "said.txt").read_text(encoding="utf-8")[-2000:]
    used = ended[2]
    return {
        "seconds": round(seconds or time.perf_counter() - began, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_MB": round(used.ru_maxrss / 1e3),
    }


def _few(made: Path, rows: str) -> Path:
    """Write rows of the same kind, 64 of which are not held out, into a folder of their own."""
    part = next(each for each in PARTS.values() if each.pattern == Path(rows).name)
    return _made(made / "few", part, 64 + HELD_OUT) / part.pattern


def _has_step(metrics: Path) -> bool:
    return metrics.exists() and any('"loss"' in line for line in metrics.read_text(encoding="utf-8").splitlines())


@contextmanager
def _running(command: Sequence[str], made: Path) -> Iterator[subprocess.Popen]:
    with (made / "said.txt").open("w", encoding="utf-8") as said:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=made, env=environment)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


def table(every: Results) -> str:
    """Return the results as Markdown, a table for each part."""
    return "\n".join(_table(PARTS[name].title, every[name]) for name in PARTS if name in every)


def _table(title: str, found: Results) -> str:
    said = f"{title}: {found['rows']:,} rows in {found['files']:,} file{'s'[: found['files'] != 1]}, "
    said += f"{found['bytes'] / 1e6:,.0f} MB"
    if found["wanted"] > found["rows"]:
        said += f" (the disk had no room for {found['wanted']:,} rows)"
    if index := found.get("index_bytes"):
        said += f"; the index has {index / found['rows']:.0f} bytes a row"
    loads = [each["load"] for each in found["ways"].values()]
    said += f". {found['machine']['cores']} cores, load average {min(loads):g} to {max(loads):g}.\n\n"
    head = ["", "seconds", "of processors", "a drawn row", "own memory of a rank", "with shared pages", "peak"]
    lines = [_line(way, found["ways"][way], found["rows"]) for way in WAYS if way in found["ways"]]
    return said + markdown_table(head, lines)


def _line(way: str, found: Results, rows: int) -> list[str]:
    if "left_out" in found:
        return [f"{WAYS[way]}: {found['left_out']}", *[""] * 6]
    of = f", {found['rows']:,} of the rows, for which there was room" if found.get("rows", rows) < rows else ""
    units = {"seconds": " s", "processor_seconds": " s", "draw_ms": " ms", "own_MB": " MB"}
    units |= {"share_MB": " MB", "peak_MB": " MB"}
    return [WAYS[way] + of, *(f"{found[name]:,}{unit}" if name in found else "" for name, unit in units.items())]


if __name__ == "__main__":
    main()

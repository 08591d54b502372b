"""The cost of reading a long run: resume, the report, the page, a list of many runs; and of writing a picture.

    python -m benchmarks.written_scale --tree /path/of/another/commit

This makes a run of 100,000 steps and a folder of 1,000 runs, and measures this tree and, before it, the other trees
named, one after the other on the same files. Each figure comes from its own process: seconds, seconds of processor time
(which a busy machine changes less), and the peak memory. Writes benchmarks/results/written_scale.json and .md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.drivers.long_written import EVERY_STEP, TREE, make_many, make_written
from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, write_results
from tests.web.view.serving import free_port

HERE = Path(__file__).parent.parent
MEASURES = Path(__file__).parent / "drivers" / "written_measures.py"
PARTS = {
    "page: curves": "curves",
    "page: findings": "findings",
    "page: ranks and times": "ranks",
    "page: held-out rows": "heldout",
    "page: ten cards": "cards",
    "page: one row": f"row?id={EVERY_STEP}",
}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--tree", action="append", default=[], help="a checkout to measure before this one")
    parser.add_argument("--keep", type=Path, help="make the files in this folder, or use those that are there")
    given = parser.parse_args()
    with TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        run, many = folder / "long" / "run", folder / "many"
        if not run.exists():
            os.environ[TREE] = given.tree[0] if given.tree else ""
            make_written(run, given.steps)
            make_many(many, given.runs, 200)
        trees = {_commit(Path(tree)): Path(tree) for tree in given.tree} | {"this": HERE}
        found = {name: _measured(tree, run, many) for name, tree in trees.items()}
    results = {"machine": machine(), "steps": given.steps, "runs": given.runs, "trees": found}
    write_results(RESULTS / "written_scale.json", results, _markdown(results))
    print(_markdown(results))


def _commit(tree: Path) -> str:
    asked = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or tree.name


def _measured(tree: Path, run: Path, many: Path) -> dict[str, Any]:
    """Measure a checkout. `load` is the load average at its start and its end."""
    load = [os.getloadavg()[0]]
    found: dict[str, Any] = {"resume": _printed(tree, "resume", run)}
    found["report"] = _command(tree, "report", run)
    found |= _page(tree, run)
    found["runs"] = _command(tree, "runs", many)
    found["picture"] = _printed(tree, "picture")
    return {**found, "load": [*load, os.getloadavg()[0]]}


def _environment(tree: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **more}


def _printed(tree: Path, *words: Any) -> dict[str, Any]:
    command = [sys.executable, str(MEASURES), *map(str, words)]
    return json.loads(subprocess.run(command, check=True, env=_environment(tree), stdout=subprocess.PIPE).stdout)


def _command(tree: Path, *words: Any) -> dict[str, Any]:
    """Run a command of tiercel, and return the seconds, processor time and peak memory of its process, including its
    start."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tiercel", *map(str, words)]
    process = subprocess.Popen(command, env=_environment(tree), cwd=run_folder(), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024}


def run_folder() -> str:
    """Return a folder without a `tiercel` in it, which `-m` would find first."""
    return os.environ.get("TMPDIR", "/tmp")


def _page(tree: Path, run: Path) -> dict[str, Any]:
    """Request each part of the page from a server: seconds, processor time and bytes of the answer; then its peak
    memory."""
    found: dict[str, Any] = {}
    with _served(tree, run) as (process, root), httpx.Client(timeout=600) as client:
        for name, part in PARTS.items():
            begun, cpu = time.perf_counter(), _cpu(process.pid)
            answer = client.get(f"{root}/{part}{'&' if '?' in part else '?'}run=run")
            assert answer.status_code == 200, (part, answer.status_code, answer.text[:200])
            seconds, used = time.perf_counter() - begun, _cpu(process.pid) - cpu
            found[name] = {"seconds": seconds, "cpu_seconds": used, "bytes": len(answer.content)}
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        most = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        found["page: all of it"] = {
            "seconds": sum(each["seconds"] for each in found.values()),
            "cpu_seconds": _cpu(process.pid),
            "memory": most,
        }
    return found


@contextmanager
def _served(tree: Path, run: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    with TemporaryDirectory() as state:
        port = free_port()
        words = [sys.executable, "-m", "tiercel", "view", str(run), "--port", str(port)]
        environment = _environment(tree, XDG_STATE_HOME=state)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=run_folder())
        try:
            assert process.stdout is not None
            token = process.stdout.readline().strip().partition("token=")[2]
            yield process, f"http://127.0.0.1:{port}/{token}"
        finally:
            process.kill()
            process.wait(10)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _markdown(results: dict[str, Any]) -> str:
    trees = results["trees"]
    head = ["", *(f"{name}: {what}" for name in trees for what in ("s", "s of processor", "MB"))]
    rows = []
    for measure in next(iter(trees.values())):
        if measure != "load":
            rows.append([_title(measure), *(cell for found in trees.values() for cell in _cells(found[measure]))])
    loads = "; ".join(f"{name}: {found['load'][0]:.1f} to {found['load'][1]:.1f}" for name, found in trees.items())
    return (
        f"A run of {results['steps']:,} steps and a folder of {results['runs']:,} runs, on "
        f"{results['machine']['cores']} cores; all columns of one machine and the same files. Load average {loads}."
        "\n\n"
        + markdown_table(head, rows)
        + "\nMB: for resuming, what it takes more than the program itself; for a part of the page, the answer; for a "
        "picture, its file; else the most memory of the process. A picture has 1288 x 980 pixels with noise, and its "
        "seconds are those that the step waits.\n"
    )


def _title(measure: str) -> str:
    return {"resume": "resume, nothing to cut", "report": "`tiercel report`", "runs": "`tiercel runs`"}.get(
        measure, measure
    )


def _cells(found: dict[str, Any]) -> list[str]:
    size = found.get("memory", found.get("bytes_more", found.get("bytes", 0))) / 1e6
    seconds = found.get("waited_seconds", found["seconds"])
    return [f"{seconds:.2f}", f"{found['cpu_seconds']:.2f}", f"{size:.1f}"]


if __name__ == "__main__":
    main()

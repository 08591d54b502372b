"""Run directories that contain something else: every reader of runs says what is odd, and shows the other runs.

Each accident happens to each file of a real run. Then `tiercel runs`, `runs --compare`, `report` and the page's server
read it next to a good run: no traceback, no wait, no gigabytes, the odd file is named, and the good run is shown as
usual.
"""

import asyncio
import io
import json
import resource
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx

from benchmarks.faults.accidents import ACCIDENTS, IN_PLACE, LINES, made_run, mended, take_limits
from benchmarks.faults.child import Send, collect
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tiercel.cli.main import main
from tiercel.errors import EXIT_USER
from tiercel.web.view.runs import Runs
from tiercel.web.view.server import PARTS, make_app

SHORT_STRIDE = 19
CASES_OF_A_PROCESS, PROCESS_SECONDS = 25, 120.0
NOT_READ = ("checkpoints", ".lock")  # by these commands
# Accidents after which a file cannot be read at all, and the files that the report shows.
UNREADABLE = ("a pipe", "a device", "a socket", "a directory", "a link to nothing", "6 GB of nothing")
UNREADABLE += ("a link to itself", "a file that may not be read")
REPORTED = ("metrics.jsonl", "bad_rows.jsonl", "env.json", "log.txt", "rollouts", "evaluations", "images", "end.json")
END_IS_READ = ("6 GB of nothing", "log.txt")  # of a log, however long, the end is shown
CASE_SECONDS = 5.0  # of processor time
CASE_BYTES = 300 << 20  # bytes that a case may take beyond those of earlier cases
Case = tuple[str, str]  # an accident, and the file that it happens to
_HOST = "http://127.0.0.1:8420"


def odd_runs(size: Size, seed: int, work: Path) -> Figure:
    """Try every accident in every file. `seed` shifts what a short run leaves out."""
    started = time.perf_counter()
    run, kept = work / "runs" / "odd", work / "kept"
    made_run(work).with_suffix("").rename(kept)
    for name in ("good", "odd"):
        mended(work / "runs" / name, kept)
    cases = list(cases_of(kept))
    cases = cases if size == "full" else cases[seed % SHORT_STRIDE :: SHORT_STRIDE]
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):  # in separate processes, so that one that hangs is one case
        part = cases[len(outcomes) : len(outcomes) + CASES_OF_A_PROCESS]
        received, end = collect(partial(_attempt, run, kept, part), PROCESS_SECONDS)
        outcomes += received
        if len(received) < len(part):
            outcomes.append((", ".join(part[len(received)]), end or "the process ended"))
            mended(run, kept)
    return figure_of("hostile run directories", outcomes, seed=seed, seconds=time.perf_counter() - started)


def cases_of(run: Path) -> Iterator[Case]:
    """Yield the accidents for each file that readers of runs read, and for only one of many files of a kind."""
    seen = set[str]()
    for file in sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file()):
        if file.parts[0] in NOT_READ or (len(file.parts) > 1 and file.parts[0] in seen):
            continue
        seen.add(file.parts[0])
        for name in [*(LINES if file.suffix in (".jsonl", ".txt") else ()), *IN_PLACE]:
            yield name, file.as_posix()


def _attempt(run: Path, kept: Path, cases: list[Case], send: Send) -> None:
    take_limits()
    expected = _shown(run.parent / "good")
    for name, file in cases:
        ACCIDENTS[name](run / file)
        before, began = _peak_bytes(), time.process_time()
        problem = _problem(run, name, file, expected)
        took, more = time.process_time() - began, _peak_bytes() - before
        if problem is None and took > CASE_SECONDS:
            problem = f"took {took:.1f} s"
        if problem is None and more > CASE_BYTES:
            problem = f"took {more >> 20:,} MB"
        send((f"{name}, {file}", problem))
        mended(run, kept)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _problem(run: Path, accident: str, file: str, expected: str | None) -> str | None:
    good = run.with_name("good")
    if (found := _shown(run.parent)) != expected:
        return f"the good run is listed as {found}, not as {expected}"
    said = []
    for words in (["runs", "--compare", str(good), str(run)], ["runs", str(run.parent)], ["report", str(run)]):
        code, text = _said(words)
        if code not in (0, EXIT_USER):
            return f"{words[0]} ended with {code}: {text[-500:]}"
        said.append(text)
    page = (run / "report.html").read_text() if code == 0 else ""
    is_lost = accident in UNREADABLE and file.split("/")[0] in REPORTED and (accident, file) != END_IS_READ
    if is_lost and Path(file).name not in "".join(said) + page.partition("</header>")[0]:
        return f"nothing names the file: {said}"
    return asyncio.run(_page_problem(run))


def _shown(folder: Path) -> str | None:
    code, said = _said(["runs", "--json", str(folder)])
    entries = json.loads(said) if code == 0 else []
    return next((json.dumps(each) for each in entries if Path(each["path"]).name == "good"), None)


def _said(words: list[str]) -> tuple[int | None, str]:
    """Return a command's exit code and output. The code is None if it raised an unforeseen error."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            return main(words), out.getvalue()
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"


async def _page_problem(run: Path) -> str | None:
    runs = Runs([run.parent])
    app, following = make_app(runs, "token")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=f"{_HOST}/token") as client:
        for path in _paths(run):
            try:
                answer = await client.get(path)
            except Exception as error:
                return f"the page, {path}: {type(error).__name__}: {error}"
            is_good = "good" in path and "odd" not in path
            if answer.status_code not in ((200,) if is_good else (200, 404, 503)):
                return f"the page, {path}: {answer.status_code}"
    following._look_ahead()
    following._look()
    return None


def _paths(run: Path) -> Iterator[str]:
    yield from ("/", "/runs", "/compare?run=good&run=odd")
    for name in ("odd", "good"):
        yield from (f"/{part}?run={name}" for part in PARTS)
        for folder in ("rollouts", "evaluations"):
            yield f"/cards?run={name}&folder={folder}"
            yield f"/cards?run={name}&folder={folder}&text=a"
        yield f"/row?run={name}&id={quote('row-1')}"
    for picture in sorted((run / "images").glob("*.png"))[:1]:
        yield f"/images/{picture.stem}?run=odd"

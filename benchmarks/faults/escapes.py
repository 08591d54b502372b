"""Image paths that point elsewhere: no file outside the roots is opened, no socket is made, and each row is refused by
its field.

Every path is in rows of all three formats, which are read and decoded in a process that counts every open and socket.
Absolute paths that lead under a root are next to them, and are accepted.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.faults.child import Send, collect
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tiercel.config.data import FormatName
from tiercel.config.schema import Data
from tiercel.data.media.images import ImageProblem, decode, open_header
from tiercel.data.reading import read_rows
from tiercel.types import ImageRoots, Row

SECONDS = 120.0
PIXELS = 1_000_000
SHORT_STRIDE = 3

ROWS: dict[FormatName, Callable[[Any], dict[str, Any]]] = {
    "tiercel": lambda images: {"messages": [{"role": "user", "content": "What?"}], "images": images, "answer": "7"},
    "swift": lambda images: {"query": "What?", "response": "7", "images": images},
    "vlm_r1": lambda images: {
        "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "7"}],
        "image": images,
    },
}
TRAVERSALS = (
    "../outside/secret.png",
    "sub/../../outside/secret.png",
    "./../outside/secret.png",
    "sub/./.././../outside/secret.png",
    "..",
    "../",
    "..\\outside\\secret.png",
    "sub\\..\\..\\outside\\secret.png",
    "%2e%2e/outside/secret.png",
    "..%2foutside%2fsecret.png",
    "%2e%2e%2foutside%2fsecret.png",
    "..%252foutside%252fsecret.png",
    "..%c0%afoutside%c0%afsecret.png",
    "\u2024\u2024/outside/secret.png",
    "\uff0e\uff0e/outside/secret.png",
    "\uff0e\uff0e\uff0foutside\uff0fsecret.png",
    "..\u2215outside\u2215secret.png",
    "..\u2044outside\u2044secret.png",
    ".\u200b./outside/secret.png",
    "\u202e../outside/secret.png",
    "..;/outside/secret.png",
    ".../.../outside/secret.png",
    "..\0/outside/secret.png",
    "inside.png\0../outside/secret.png",
    "../outside/secret.png\0.png",
    "..\n/outside/secret.png",
    "\ud800../outside/secret.png",
    "sub/" * 2000 + "../" * 2001 + "outside/secret.png",
    "a/" * 500_000 + "secret.png",
    "x" * 300,
    "x" * 1_000_000,
    "",
    " ",
    ".",
    "sub",
    "sub/",
)
URLS = (
    "file://{outside}/secret.png",
    "file:{outside}/secret.png",
    "FILE://{outside}/secret.png",
    "file://localhost{outside}/secret.png",
    "http://169.254.169.254/latest/meta-data/",
    "https://169.254.169.254/latest/meta-data/iam",
    "HTTP://169.254.169.254/",
    "http://[::1]/secret.png",
    "http://localhost:8000/secret.png",
    "//169.254.169.254/secret.png",
    "\\\\169.254.169.254\\share\\secret.png",
    "\\\\?\\C:\\secret.png",
    "\\\\.\\pipe\\secret",
    "ftp://169.254.169.254/secret.png",
    "s3://bucket/secret.png",
    "gs://bucket/secret.png",
    "hf://datasets/owner/name/secret.png",
    "data:image/png;base64,iVBORw0KGgo=",
    "jar:file:{outside}/secret.png!/a",
    "gopher://169.254.169.254:80/_GET",
    "zip://{outside}/secret.png",
    " http://169.254.169.254/",
    "\thttp://169.254.169.254/",
)
ABSOLUTE = (
    "{outside}/secret.png",
    "/{outside}/secret.png",
    "{root}/../outside/secret.png",
    "{root}/link.png",
    "{root}/directory/secret.png",
    "{more}/link.png",
    "{more}/chain.png",
    "{more}/up/outside/secret.png",
    "{more}/../outside/secret.png",
    "{more}/loop.png",
    "{more}2/secret.png",
    "{more}",
    "/",
    "/etc/passwd",
    "/proc/self/environ",
    "/proc/self/cwd/outside/secret.png",
    "/dev/stdin",
    "/dev/fd/0",
    "~/secret.png",
    "~root/secret.png",
    "$HOME/secret.png",
    "${HOME}/secret.png",
    "%USERPROFILE%\\secret.png",
    "C:\\secret.png",
    "C:secret.png",
    "c:/secret.png",
    "Z:\\outside\\secret.png",
)
LINKS = (
    "link.png",
    "directory/secret.png",
    "chain.png",
    "sub/up/outside/secret.png",
    "directory/../link.png",
    "loop.png",
)
TAKEN = (
    "inside.png",
    "{root}/inside.png",
    "{more}/inside.png",
    "{alias}/inside.png",
    "/{more}/./inside.png",
    "to-more.png",
)


def escapes(size: Size, seed: int, work_dir: Path) -> Figure:
    """Try every path in every format. `seed` shifts what a short run leaves out."""
    started = time.perf_counter()
    roots, outside = make_places(work_dir)
    paths = [*TRAVERSALS, *(_placed(path, work_dir) for path in (*URLS, *ABSOLUTE)), *LINKS]
    if size == "short":
        paths = [*paths[seed % SHORT_STRIDE :: SHORT_STRIDE], *LINKS]
    forms = [*paths, *([path] for path in paths), *({"path": path} for path in paths)]
    refused = [(format, images) for format in ROWS for images in (forms if size == "full" else forms[:: len(ROWS)])]
    taken = [(format, _placed(path, work_dir)) for format in ROWS for path in TAKEN]
    cases = [*((case, False) for case in refused), *((case, True) for case in taken)]

    def work(send: Send) -> None:
        events = Counter[str]()
        sys.addaudithook(lambda event, arguments: _count(events, outside, event, arguments))
        for number, ((format, images), is_good) in enumerate(cases):
            problem = _problem(roots, work_dir / f"rows-{number}.jsonl", format, images)
            if is_good:
                problem = None if problem == f"{decode.__name__} took it" else problem or "was refused"
            if problem is None and events:
                problem = f"{dict(events)}"
            send(((f"{format}, {str(images)[:80]!r}", problem), dict(events)))
            events.clear()

    received, end = collect(work, SECONDS)
    outcomes: list[Outcome] = [outcome for outcome, _ in received]
    if end is not None:
        outcomes.append((f"the process, after {outcomes[-1][0] if outcomes else 'nothing'}", end))
    opened = sum(events.get("open", 0) for _, events in received)
    sockets = sum(count for _, events in received for event, count in events.items() if event != "open")
    return figure_of(
        "path and URL escapes",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"files_opened_outside": opened, "socket_events": sockets},
    )


def make_places(work_dir: Path) -> tuple[ImageRoots, Path]:
    """Create roots with an image and links that lead out of them, and a directory outside with a good image."""
    root, more, outside = work_dir / "root", work_dir / "more", work_dir / "outside"
    (root / "sub").mkdir(parents=True)
    more.mkdir()
    outside.mkdir()
    picture = Image.new("RGB", (56, 56), "red")
    picture.save(outside / "secret.png")
    for place in (root, more):
        picture.save(place / "inside.png")
        (place / "link.png").symlink_to(outside / "secret.png")
        (place / "chain.png").symlink_to(place / "link.png")
        (place / "loop.png").symlink_to(place / "loop.png")
        (place / "up").symlink_to(work_dir)
    (root / "to-more.png").symlink_to(more / "inside.png")
    (root / "directory").symlink_to(outside)
    (root / "sub" / "up").symlink_to(work_dir)
    (work_dir / "more2").symlink_to(outside)
    (work_dir / "alias").symlink_to(more)
    return ImageRoots(base=str(root), more=(str(work_dir / "alias"),)), outside


def _placed(path: str, work_dir: Path) -> str:
    for name in ("root", "more", "outside", "alias"):
        path = path.replace(f"{{{name}}}", str(work_dir / name))
    return path


def _count(events: Counter[str], outside: Path, event: str, arguments: tuple[Any, ...]) -> None:
    """Count an event in an audit hook, which cannot be removed and ends with its process."""
    if event.startswith("socket."):
        events[event] += 1
    elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if "\0" not in path and os.path.realpath(path).startswith(str(outside)):
            events[event] += 1


def _problem(roots: ImageRoots, file: Path, format: FormatName, images: Any) -> str | None:
    """Return what is wrong with how the row ended. A good row next to it keeps the file readable."""
    records = [ROWS[format]("inside.png"), ROWS[format](images)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    config = Data(
        train=str(file), image_root=roots.base, image_roots=roots.more, format=format, max_image_pixels=PIXELS
    )
    table = read_rows(file, config, "grpo")
    if table.rejected:
        (rejected,) = table.rejected
        if not rejected.field.startswith(("images", "image")):
            return f"refused by the field {rejected.field}"
        return None if rejected.reason.isprintable() and len(rejected.reason) < 1000 else f"said {rejected.reason!r}"
    _, row = table.rows
    return _decoding_problem(row)


def _decoding_problem(row: Row) -> str | None:
    """Return the last reader that accepted an image, or how its refusal was wrong."""
    took = None
    for read in (open_header, decode):
        for source in row.images:
            try:
                read(source, row.image_roots, PIXELS)
            except ImageProblem as problem:
                if problem.field != "images" or not problem.reason or not str(problem).isprintable():
                    return f"refused as {problem.field}: {str(problem)!r}"
            else:
                took = f"{read.__name__} took it"
    return took

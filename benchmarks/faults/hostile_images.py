"""Hostile images: each is a picture within the limits, or is refused with its path and the reason, in bounded memory.

Each goes through the header, the decoder and a family's resizing, in a process with a limit on its memory.
"""

import resource
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.faults.child import Send, collect
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.odd_pictures import write_pictures
from benchmarks.faults.tiny_run import FAMILY
from tests.tiny_models import save_tiny_checkpoint
from tiercel.config.schema import Model
from tiercel.data.media.images import ImageProblem, decode, open_header
from tiercel.errors import DataError
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.types import ImageRoots, ImageSource

COUNTS = {"short": 200, "full": 500}
SECONDS = 300.0
SECONDS_EACH = 10.0
MAX_PIXELS = 10_000_000
# For a picture at the limit: 4 for RGB, three times as much while transparency is drawn on white, and the memory of
# decoders.
BYTES_OF_A_PIXEL = 24
BYTES_BESIDE = 128 << 20  # Pillow's own limit for the texts of a PNG is 64 MiB
ROOM = 2 << 30  # address space beyond what the process has at its start


class Hung(BaseException):
    """An image took too long. No code that handles errors may catch this."""


def hostile_images(size: Size, seed: int, work_dir: Path) -> Figure:
    """Try all images in one child process. An image that kills it is the one after the last answer."""
    started = time.perf_counter()
    root = work_dir / "images"
    root.mkdir()
    names = write_pictures(root, COUNTS[size], seed)
    family = load_family(Model(path=str(save_tiny_checkpoint(FAMILY, work_dir / "model"))))

    def work(send: Send) -> None:
        at_start = _limit_memory()
        signal.signal(signal.SIGALRM, _ring)
        for name in names:
            send((name, *_judged(name, root, family), _memory("VmHWM") - at_start))

    received, end = collect(work, SECONDS)
    outcomes: list[Outcome] = [(name, problem) for name, problem, *_ in received]
    if end is not None:
        outcomes.append((names[len(received)], end))
    pictures = sum(is_picture for _, _, is_picture, _, _ in received)
    growth = max((growth for *_, growth in received), default=0)
    limit = BYTES_OF_A_PIXEL * MAX_PIXELS + BYTES_BESIDE
    if growth > limit:
        outcomes.append(("memory", f"grew by {growth:,} bytes, more than {limit:,}"))
    return figure_of(
        "hostile images",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "pictures": pictures,
            "refused": len(received) - pictures,
            "peak_growth_mb": growth / 1e6,
            "longest_seconds": max((seconds for *_, seconds, _ in received), default=0.0),
        },
    )


def _judged(name: str, root: Path, family: Family) -> tuple[str | None, bool, float]:
    """Return what is wrong with how an image ended, whether it is a picture, and the seconds it took."""
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS_EACH)
    try:
        problem = _taken(name, root, family)
        is_picture = True
    except DataError as error:
        problem = _refusal_problem(error, name)
        is_picture = False
    except (Exception, Hung) as error:  # the fault looks for any other end
        problem = f"{type(error).__name__}: {error}"
        is_picture = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return problem, is_picture, time.perf_counter() - started


def _taken(name: str, root: Path, family: Family) -> str | None:
    """Return what is wrong with an accepted image. Raises DataError if it is refused."""
    source = ImageSource(path=name)
    roots = ImageRoots(base=str(root))
    size = open_header(source, roots, MAX_PIXELS)
    picture = decode(source, roots, MAX_PIXELS)
    if picture.mode != "RGB" or picture.size != size or size[0] * size[1] > MAX_PIXELS or picture.info:
        return f"header {size}, picture {picture.size} {picture.mode}"
    plan = family.plan_image(size)
    image = family.encode_image(picture)
    width, height = plan.processed_size
    if image.plan != plan or image.views[0].shape != (height, width, 3):
        return f"planned {plan}, encoded {image.plan}"
    if width * height > family.checkpoint.image_processor.size["longest_edge"]:
        return f"resized to {width} x {height}"
    return None


def _refusal_problem(error: DataError, name: str) -> str | None:
    if isinstance(error, ImageProblem) and (error.path != name or not error.reason):
        return f"refused as {error.path!r}: {error.reason!r}"
    if error.field != "images" or not str(error).isprintable():
        return f"refused by {error.field}: {error}"
    return None


def _ring(number: int, frame: FrameType | None) -> Any:
    raise Hung(f"not done after {SECONDS_EACH:g} s")


def _limit_memory() -> int:
    """Return the bytes that the process has now. Its peak counts from here, and it gets little more address space."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ROOM, hard))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    """Return a number of bytes of this process, as Linux reports it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")

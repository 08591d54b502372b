"""One measurement of what a run has written, in its own process: `written_measures.py resume RUN`. Prints JSON.

It is run by its path, so that `tiercel` is found on PYTHONPATH and an older commit can be measured too.
"""

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

PICTURES, SIZE = 16, (1288, 980)


def resume(run: Path) -> dict[str, Any]:
    """Open a run that has nothing to cut, as the same command does: lock it, find the checkpoint, read the metrics."""
    from tiercel.reliability.diagnosis import Diagnosis
    from tiercel.runs import directory
    from tiercel.runs.directory import open_run, roll_back_to_checkpoint
    from tiercel.runs.recipe import load_run_recipe

    recipe = load_run_recipe(run)
    before = _resident()

    def again() -> None:
        with open_run(recipe) as opened:
            assert roll_back_to_checkpoint(opened) is not None
            kept = _rows(directory, run)
            Diagnosis(kept)
            assert kept[-1]["step"] > 0

    return {**_timed(again), "bytes_more": max(0, _largest() - before)}


def _rows(directory: Any, run: Path) -> Any:
    """Return the rows of metrics as a resume reads them. Older commits read all of them."""
    try:
        from tiercel.runs.json_lines import Rows
    except ImportError:
        return directory.read_metrics(run)
    return Rows(run / "metrics.jsonl")


def picture(folder: Path) -> dict[str, Any]:
    """Save pictures as a step does, and return how long the step waits and how long it takes in all."""
    import torch

    from tiercel.distributed.ranks import ALONE
    from tiercel.runs import directory

    made = [_photograph(number) for number in range(PICTURES)]
    run = directory.RunDirectory(path=folder, ranks=ALONE)
    images = [
        type("Image", (), {"sha256": f"{number:064x}", "views": (torch.from_numpy(np.array(each)),)})()
        for number, each in enumerate(made)
    ]

    def step() -> None:
        for image in images:
            run.save_image(image)

    def whole() -> None:
        step()
        run.finish_files()

    begun = time.perf_counter()
    step()
    waited = time.perf_counter() - begun
    run.finish_files()
    size = sum(file.stat().st_size for file in (folder / "images").iterdir())
    shutil.rmtree(folder / "images")
    (folder / "images").mkdir()
    found = _timed(whole)
    return {
        "waited_seconds": waited / PICTURES,
        **{name: value / PICTURES for name, value in found.items()},
        "bytes": size // PICTURES,
    }


def _photograph(number: int) -> Image.Image:
    """Return a picture with the noise and the edges of a photograph."""
    dice = np.random.default_rng(number)
    small = Image.fromarray(dice.integers(0, 256, (49, 64, 3), dtype=np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
    pixels = np.asarray(small.filter(ImageFilter.GaussianBlur(2)), dtype=np.float32)
    noise = dice.normal(0, 3, pixels.shape).astype(np.float32)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _timed(action: Callable[[], None]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "picture":
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "images").mkdir()
            print(json.dumps(picture(Path(made))))
    else:
        print(json.dumps(resume(Path(given[0]))))

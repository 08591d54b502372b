"""Training of the demos' starting checkpoints: python -m tools.demo.make_start [pointing | zoom], in tiercel's own
directory."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from examples.pairs import pointing
from examples.scenes import SceneSet, write_scenes
from examples.zoom import demo as zoom
from tiercel.demo import command
from tiercel.demo.questions import KINDS
from tiercel.demo.running import run_command
from tiercel.demo.sheet_rows import RowSet, write_questions
from tiercel.demo.sheets import SQUARE
from tools.demo.checkpoint import SHEET_WORDS, THOUGHT, WORDS, ZOOM_WORDS, Form, save_random_checkpoint
from tools.demo.sheet_lessons import write_squares
from tools.demo.tokenizer import TOOL_TEMPLATE, make_tokenizer
from tools.demo.zoom_lessons import write_lessons

SQUARES = RowSet(name="squares", count=38_400, seed=11)
HELD_OUT_SQUARES = RowSet(name="squares-heldout", count=1024, seed=12, is_held_out=True)
# Sums take the longest to learn: a question about the ink, and then a table of additions.
LESSONS = RowSet(name="lessons", count=64_000, seed=14, kinds=(*KINDS, "sum", "sum"), is_answered=False)
HELD_OUT_LESSONS = replace(LESSONS, name="lessons-heldout", count=510, seed=15, is_held_out=True)
ANSWERED = RowSet(name="answered", count=38_400, seed=14)
HELD_OUT_ANSWERED = replace(ANSWERED, name="answered-heldout", count=512, seed=15, is_held_out=True)
# A window of the vision tower is a square, so what it has learnt from a square also holds on a sheet.
SHEET_FORM = Form(window=SQUARE, whole_layers=(), least_pixels=SQUARE * SQUARE, spread=0.06)
SCENES = SceneSet(name="scenes", count=24_000, seed=11, digit_counts=(1, 1, 2, 3, 3))
HELD_OUT_SCENES = SceneSet(name="heldout", count=1024, seed=3, digit_counts=(1, 2, 3), is_held_out=True)
LARGE_SCENES, HELD_OUT_LARGE_SCENES = 3_000, 40


def make_start() -> None:
    """Train a random checkpoint to name the digit of a square, to compare it with a question, to think about whole
    sheets, and to answer. Then export it."""
    data = Path("runs/start-data")
    if not (data / "random/config.json").exists():
        for rows in (SQUARES, HELD_OUT_SQUARES):
            write_squares(data, rows)
        for rows in (LESSONS, HELD_OUT_LESSONS, ANSWERED, HELD_OUT_ANSWERED):
            write_questions(data, rows)
        save_random_checkpoint(data / "random", make_tokenizer(SHEET_WORDS, tags=THOUGHT), SHEET_FORM, seed=0)
    _train("demo-squares", data / "squares-model")
    _train("demo-notes", data / "notes-model")
    _train("demo-thoughts", data / "thoughts-model")
    _train("demo-start", command.START)
    halve(command.START)


def make_pointing_start() -> None:
    """Train a random checkpoint on scenes and export it."""
    data = Path("runs/pointing-start-data")
    if not (data / "random/config.json").exists():
        write_scenes(data, SCENES)
        write_scenes(data, HELD_OUT_SCENES)
        save_random_checkpoint(data / "random", make_tokenizer(WORDS), Form(), seed=0)
    _train("demo-pointing-start", pointing.START)


def make_zoom_start() -> None:
    """Train a smaller checkpoint to call the tool and to read what it shows, and export it."""
    data = Path("runs/zoom-start-data")
    if not (data / "random/config.json").exists():
        write_lessons(data, "lessons", LARGE_SCENES, 11, use_held_out=False)
        write_lessons(data, "heldout", HELD_OUT_LARGE_SCENES, 12, use_held_out=True)
        tokenizer = make_tokenizer(ZOOM_WORDS, chat_template=TOOL_TEMPLATE)
        save_random_checkpoint(data / "random", tokenizer, Form(hidden=96, layers=2), seed=0)
    _train("zoom-start", zoom.START)
    halve(zoom.START)


def halve(checkpoint: Path) -> None:
    """Convert the weights to float16, which takes half the space."""
    weights = checkpoint / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def _train(name: str, target: Path) -> None:
    """Run recipes/NAME-sft.yaml, whose run is runs/NAME, and export what it has trained."""
    run_command("sft", f"recipes/{name}-sft.yaml")
    shutil.rmtree(target, ignore_errors=True)
    run_command("export", f"runs/{name}", "--merge", "--output", str(target))


if __name__ == "__main__":
    {"zoom": make_zoom_start, "pointing": make_pointing_start}.get("".join(sys.argv[1:]), make_start)()

"""Make starting checkpoints of the demos: python -m tools.demo.make_start [zoom], in tiercel's own directory."""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tiercel.demo import command, zoom
from tiercel.demo.running import run_command
from tiercel.demo.scenes import SceneSet, write_scenes
from tools.demo.checkpoint import WORDS, ZOOM_WORDS, save_random_checkpoint
from tools.demo.tokenizer import TOOL_TEMPLATE, make_tokenizer
from tools.demo.zoom_lessons import write_lessons

SCENES = SceneSet(name="scenes", count=24_000, seed=11, digit_counts=(1, 1, 2, 3, 3))
HELD_OUT = SceneSet(name="heldout", count=1024, seed=3, digit_counts=(1, 2, 3), is_held_out=True)
LARGE_SCENES, HELD_OUT_LARGE_SCENES = 3_000, 40


def make_start() -> None:
    """Train a random checkpoint on scenes and export it."""
    data = Path("runs/start-data")
    if not (data / "random/config.json").exists():
        write_scenes(data, SCENES)
        write_scenes(data, HELD_OUT)
        save_random_checkpoint(data / "random", make_tokenizer(WORDS), seed=0)
    _train("demo-start", command.START)


def make_zoom_start() -> None:
    """Train a smaller one to call the tool and to read what it shows, and export it."""
    data = Path("runs/zoom-start-data")
    if not (data / "random/config.json").exists():
        write_lessons(data, "lessons", LARGE_SCENES, 11, use_held_out=False)
        write_lessons(data, "heldout", HELD_OUT_LARGE_SCENES, 12, use_held_out=True)
        tokenizer = make_tokenizer(ZOOM_WORDS, chat_template=TOOL_TEMPLATE)
        save_random_checkpoint(data / "random", tokenizer, seed=0, hidden=96, layers=2)
    _train("zoom-start", zoom.START)
    halve(zoom.START)


def halve(checkpoint: Path) -> None:
    """Keep the weights in float16, in half of the space."""
    weights = checkpoint / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def _train(name: str, target: Path) -> None:
    run_command("sft", f"recipes/{name}-sft.yaml")
    shutil.rmtree(target, ignore_errors=True)
    run_command("export", f"runs/{name}", "--merge", "--output", str(target))


if __name__ == "__main__":
    make_zoom_start() if sys.argv[1:] == ["zoom"] else make_start()

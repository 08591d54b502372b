"""Make the demo's starting checkpoint again: python -m tiercel.demo.make_start, in tiercel's own directory."""

import shutil
from pathlib import Path

from tiercel.demo.checkpoint import save_random_checkpoint
from tiercel.demo.command import START, run_command
from tiercel.demo.scenes import write_scenes

SCENES, HELD_OUT_SCENES = 24_000, 1024


def main() -> None:
    """Train a random checkpoint on scenes and export it."""
    data = Path("runs/start-data")
    if not (data / "random/config.json").exists():
        write_scenes(data, "scenes", SCENES, 11, (1, 1, 2, 3, 3), use_held_out=False)
        write_scenes(data, "heldout", HELD_OUT_SCENES, 3, (1, 2, 3), use_held_out=True)
        save_random_checkpoint(data / "random", seed=0)
    run_command("sft", "recipes/demo-start-sft.yaml")
    shutil.rmtree(START, ignore_errors=True)
    run_command("export", "runs/demo-start", "--merge", "--output", str(START))


if __name__ == "__main__":
    main()

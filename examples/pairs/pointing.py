"""The first part of `tiercel demo --pairs`: a model learns to point at a digit by SFT and then by GRPO."""

from pathlib import Path

from examples.scenes import SceneSet, write_scenes
from tiercel.demo.pointing import START
from tiercel.demo.running import RECIPES, require_recipes, show_command, write_data

WARMUP = SceneSet(name="warmup", count=3840, seed=1, jitter=24)
PRACTICE = SceneSet(name="practice", count=2400, seed=2)
HELD_OUT = SceneSet(name="heldout", count=1024, seed=3, is_held_out=True)
DATA, RUN = Path("runs/pointing-data"), Path("runs/pointing")


def demo_pointing() -> None:
    """Run both recipes in the working directory. Raises the same TiercelErrors as their commands."""
    require_recipes("demo-pointing-sft.yaml", "demo-pointing-grpo.yaml")
    what = "1/9 scenes of one handwritten digit"
    write_data(DATA, what, START, write_scenes, (WARMUP, PRACTICE, HELD_OUT))
    show_command("2/9", "learn to point from carelessly drawn boxes", "sft", str(RECIPES / "demo-pointing-sft.yaml"))
    if not Path("runs/pointing-sft/model").exists():
        show_command("3/9", "", "export", "runs/pointing-sft", "--merge")
    show_command("4/9", "learn to point well from the IoU alone", "grpo", str(RECIPES / "demo-pointing-grpo.yaml"))

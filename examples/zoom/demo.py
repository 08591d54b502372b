"""`tiercel demo --zoom`: GRPO with a tool that shows what the model cannot see, and without it, with both results."""

import shutil
import time
from pathlib import Path

from examples.zoom.scenes import write_questions
from tiercel.demo.running import RECIPES, evaluations_of, require_recipes, show_command
from tiercel.runs.directory import read_metrics
from tiercel.writing import writing

START = Path(__file__).parent / "start"
PRACTICE_SCENES, HELD_OUT_SCENES = 2000, 512
RECIPE = "zoom-demo.yaml"
WITH, WITHOUT = Path("runs/zoom"), Path("runs/zoom-without")
LOOKED = "eval/reward/zoomed_right/mean"


def run() -> None:
    """Run the recipe twice in the working directory. Raises the same TiercelErrors as its command."""
    started = time.monotonic()
    require_recipes(RECIPE)
    data = Path("runs/zoom-data")
    if not (data / "heldout.jsonl").exists():
        print(f"1/3 large scenes with small handwritten digits -> {data}", flush=True)
        with writing(data, "start the demo in a directory that can be written"):
            write_questions(data, "practice", PRACTICE_SCENES, 21, use_held_out=False)
            shutil.copytree(START, data / "start", dirs_exist_ok=True)
            shutil.copyfile(START.parent / "reward.py", data / "reward.py")
            write_questions(data, "heldout", HELD_OUT_SCENES, 22, use_held_out=True)
    recipe = str(RECIPES / RECIPE)
    show_command("2/3", "learn where to look from right answers alone", "grpo", recipe)
    show_command("3/3", "the same model without the tool", "grpo", recipe, "rollout.tools=[]", f"output={WITHOUT}")
    print("\n".join(summary(name, run) for name, run in (("with zoom", WITH), ("without", WITHOUT))))
    print(f"{time.monotonic() - started:.0f} s in all; open {WITH}/report.html")


def summary(name: str, run: Path) -> str:
    """Return a comparison of before and after, from metrics.jsonl alone. Raises TrainingError if an evaluation is
    missing."""
    evaluations = evaluations_of(run, read_metrics(run))
    (right, looked), (right_after, looked_after) = (
        (row["eval/accuracy"], row[LOOKED]) for row in (evaluations[0], evaluations[-1])
    )
    return (
        f"{name + ':':11}held-out accuracy {right:.3f} -> {right_after:.3f}, "
        f"zooms onto the ring {looked:.3f} -> {looked_after:.3f} ({evaluations[-1]['eval/count']} scenes)"
    )

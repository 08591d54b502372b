"""`tiercel demo`: make scenes, warm the model up by SFT, improve it by GRPO, and print the result. `--zoom` runs the
demo of zoom.py, `--pairs` that of pairs.py."""

import shutil
import time
from argparse import Namespace
from pathlib import Path

from tiercel.demo.pairs import demo_pairs
from tiercel.demo.running import RECIPES, evaluations_of, require_recipes, show_command
from tiercel.demo.scenes import SceneSet, write_scenes
from tiercel.demo.zoom import demo_zoom
from tiercel.report import describe
from tiercel.runs.directory import read_metrics
from tiercel.writing import writing

START = Path(__file__).parent / "start"
WARMUP = SceneSet(name="warmup", count=3840, seed=1, jitter=24)
PRACTICE = SceneSet(name="practice", count=2400, seed=2)
HELD_OUT = SceneSet(name="heldout", count=1024, seed=3, is_held_out=True)


def run(recipe: None, arguments: Namespace) -> None:
    """Run the demo, the one that needs a tool, or the one of pairs and a teacher, which goes on from the first."""
    if arguments.zoom:
        demo_zoom()
        return
    demo()
    if arguments.pairs:
        demo_pairs()


def demo() -> None:
    """Run both recipes in the working directory. Raises TiercelError as their commands do."""
    started = time.monotonic()
    require_recipes("demo-sft.yaml", "demo-grpo.yaml")
    data = Path("runs/demo-data")
    if not (data / "heldout.jsonl").exists():
        print(f"1/4 scenes of real handwriting -> {data}", flush=True)
        with writing(data, "start the demo in a directory that can be written"):
            write_scenes(data, WARMUP)
            write_scenes(data, PRACTICE)
            shutil.copytree(START, data / "start", dirs_exist_ok=True)
            write_scenes(data, HELD_OUT)
    show_command("2/4", "learn to point from carelessly drawn boxes", "sft", str(RECIPES / "demo-sft.yaml"))
    if not Path("runs/demo-sft/model").exists():
        show_command("3/4", "", "export", "runs/demo-sft", "--merge")
    show_command("4/4", "learn to point well from the IoU alone", "grpo", str(RECIPES / "demo-grpo.yaml"))
    print(summary(Path("runs/demo")))
    print(f"{time.monotonic() - started:.0f} s in all; open runs/demo/report.html")


def summary(run: Path) -> str:
    """Compare before and after, from metrics.jsonl alone. Raises TrainingError where an evaluation is missing."""
    rows = read_metrics(run)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    evaluations = evaluations_of(run, rows if rewards else ())
    lines = [describe(run)]
    for name, row in (("before", evaluations[0]), ("after", evaluations[-1])):
        low, high = row["eval/accuracy_low"], row["eval/accuracy_high"]
        lines.append(
            f"{name + ':':8}{row['eval/accuracy']:.3f} of {row['eval/count']} held-out scenes at IoU 0.5 "
            f"(95 % interval {low:.3f} to {high:.3f}), mean IoU {row['eval/reward/mean']:.3f}"
        )
    first, last = (sum(part) / len(part) for part in (rewards[:20], rewards[-20:]))
    lines.append(f"sampled reward: {first:.3f} in the first 20 steps, {last:.3f} in the last 20")
    return "\n".join(lines)

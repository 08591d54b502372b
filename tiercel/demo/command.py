"""`tiercel demo`: sheets of handwritten digits, four kinds of questions about them, SFT and then GRPO from right
answers alone, and a control that asks for another digit or ink. `--real` runs the demo of real.py; `--zoom` and
`--pairs` run those in examples/ of a checkout of the repository."""

import sys
import time
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from tiercel.demo.questions import KINDS
from tiercel.demo.real import demo_real
from tiercel.demo.results import before_after_control, in_words
from tiercel.demo.running import RECIPES, require_recipes, run_command, show_command, write_data
from tiercel.demo.sheet_rows import RowSet, write_questions
from tiercel.errors import EnvironmentProblem
from tiercel.web.report import describe

ROOT = Path(__file__).parents[2]  # of a checkout
START = Path(__file__).parent / "start"
WARMUP = RowSet(name="warmup", count=1920, seed=1, slips=0.5)
PRACTICE = RowSet(name="practice", count=3600, seed=2)
HELD_OUT = RowSet(name="heldout", count=1024, seed=3, is_held_out=True)
DATA, RUN = Path("runs/demo-data"), Path("runs/demo")
CONTROL = DATA / "control.jsonl"


def run(recipe: None, arguments: Namespace) -> None:
    """Run the demo, or the one with a tool, that with pairs and a teacher, or that on real weights."""
    if arguments.zoom or arguments.pairs:
        example("zoom" if arguments.zoom else "pairs")
    elif arguments.real:
        demo_real()
    else:
        demo()


def example(name: str) -> None:
    """Run a demo of the repository. Raises EnvironmentProblem if this tiercel does not lie in a checkout of it."""
    if not (ROOT / "examples" / name / "demo.py").is_file():
        raise EnvironmentProblem(
            f"the demo --{name} is in the repository's examples/, not in the package: git clone URL tiercel && "
            f"cd tiercel && make demo-{name}"
        )
    sys.path.insert(0, str(ROOT))
    import_module(f"examples.{name}.demo").run()


def demo() -> None:
    """Run the recipes in the working directory. Raises the same TiercelErrors as their commands."""
    started = time.monotonic()
    require_recipes("demo-sft.yaml", "demo-grpo.yaml")
    what = "1/5 sheets of real handwriting, and questions"
    write_data(DATA, what, START, write_questions, (WARMUP, PRACTICE, HELD_OUT))
    show_command("2/5", "learn from answers of which half are careless", "sft", str(RECIPES / "demo-sft.yaml"))
    if not Path("runs/demo-sft/model").exists():
        show_command("3/5", "", "export", "runs/demo-sft", "--merge")
    recipe = str(RECIPES / "demo-grpo.yaml")
    show_command("4/5", "learn from right answers alone", "grpo", recipe)
    print("5/5 control: the same sheets and right answers, but another digit or ink in the question", flush=True)
    adapter = max((RUN / "checkpoints").iterdir()) / "adapter"
    rows = f"data.eval={DATA / 'heldout-swapped.jsonl'}"
    run_command("eval", recipe, rows, "--adapter", str(adapter), "--output", str(CONTROL))
    print(summary(RUN, CONTROL))
    print(f"{time.monotonic() - started:.0f} s in all; open {RUN}/report.html")


def summary(run: Path, control: Path) -> str:
    """Return a comparison of the accuracy of each kind of question before and after training, and with that in the
    control's file. Raises TrainingError if an evaluation is missing."""
    before, after, swapped = before_after_control(run, control)
    lines = [f"{kind + ':':7}{in_words(before, kind)} -> {in_words(after, kind)}" for kind in (*KINDS, "all")]
    shares = ", ".join(f"{kind} {in_words(swapped, kind)}" for kind in (*KINDS, "all"))
    return "\n".join([describe(run), *lines, f"control: {shares}"])

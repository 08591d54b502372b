"""`tiercel demo --real`: real weights and a published data set, both from the package index. SmolLM2-135M-Instruct, as
the decoder behind a small vision tower, answers questions about pictures, and GRPO improves it from right answers
alone."""

import gc
import time
from pathlib import Path

from tiercel.demo.real_parts import (
    KINDS,
    QuestionSample,
    answers_without_picture,
    drawn,
    read_questions,
    require_packages,
    write_sample,
)
from tiercel.demo.results import Counts, before_after_control, in_words
from tiercel.demo.running import RECIPES, require_recipes, run_command, show_command
from tiercel.web.report import describe
from tiercel.writing import writing

START = Path(__file__).parent / "real_start"
DATA, RUN = Path("runs/real-data"), Path("runs/real")
RECIPE = "demo-real-grpo.yaml"
CONTROL = DATA / "control.jsonl"
PRACTICE = QuestionSample(
    name="practice", split="train", per_kind=400, seed=41, pictures=range(4_000), is_balanced=True
)
TEST = QuestionSample(name="test", split="test", per_kind=64, seed=42, pictures=range(1_000))


def demo_real() -> None:
    """Run the recipe in the working directory. Raises EnvironmentProblem with what to install if a package is missing,
    and the same TiercelErrors as its command."""
    started = time.monotonic()
    require_packages()
    require_recipes(RECIPE)
    if not (DATA / "test.jsonl").exists():
        print(f"1/3 easy-VQA's questions, and a model from SmolLM2-135M-Instruct -> {DATA}", flush=True)
        with writing(DATA, "start the demo in a directory that can be written"):
            make_model(DATA / "start")
            for sample in (PRACTICE, TEST):
                write_sample(DATA, sample)
    recipe = str(RECIPES / RECIPE)
    show_command("2/3", "learn from right answers alone", "grpo", recipe)
    print("3/3 control: the same questions and right answers, but another picture", flush=True)
    adapter = max((RUN / "checkpoints").iterdir()) / "adapter"
    rows = f"data.eval={DATA / 'test-swapped.jsonl'}"
    run_command("eval", recipe, rows, "--adapter", str(adapter), "--output", str(CONTROL))
    print(summary(RUN, CONTROL))
    print(f"{time.monotonic() - started:.0f} s in all; open {RUN}/report.html")


def make_model(directory: Path) -> None:
    """Write the model that the demo starts from. Raises EnvironmentProblem."""
    from tiercel.demo.real_model import compose, save  # takes seconds to import, which other demos need not wait for

    save(*compose(START), directory)
    gc.collect()


def summary(run: Path, control: Path) -> str:
    """Return a comparison of the accuracy of each kind of question before and after training, with another picture, and
    without one. Raises TrainingError if an evaluation is missing."""
    before, after, swapped = before_after_control(run, control)
    blind = without_picture(TEST)
    lines = [
        f"{kind + ':':10}{in_words(before, kind)} -> {in_words(after, kind)}; another picture "
        f"{in_words(swapped, kind)}; without a picture {blind[kind][0] / blind[kind][1]:.3f}"
        for kind in (*KINDS, "all")
    ]
    return "\n".join([describe(run), *lines])


def without_picture(sample: QuestionSample) -> Counts:
    """Count how often the most frequent training answer to a question's text is right, which needs no picture."""
    said = answers_without_picture(read_questions("train"))
    counts: dict[str, tuple[int, int]] = {}
    for question in drawn(sample):
        for kind in (question.kind, "all"):
            right, count = counts.get(kind, (0, 0))
            counts[kind] = (right + (said.get(question.text) == question.answer), count + 1)
    return counts

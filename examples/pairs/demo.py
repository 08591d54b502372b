"""`tiercel demo --pairs`: ways to improve a model that points, without true boxes: pairs of boxes, a teacher, and a
reward model."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.pairs.pointing import DATA, demo_pointing
from examples.pairs.pointing import RUN as TEACHER
from examples.scenes import jittered, written
from tiercel.demo.handwriting import Box, write_rows
from tiercel.demo.running import RECIPES, evaluations_of, require_recipes, run_command, show_command
from tiercel.rewards.boxes import iou
from tiercel.runs.directory import read_metrics
from tiercel.writing import writing

CAREFUL, CARELESS = 8, 24  # pixels by which the corners of the two boxes of a pair may be off
LEAST_DIFFERENCE = 0.1  # between the IoUs of the two boxes with the true box
PAIRS_OF_A_SCENE = 8
NAMES = ("practice", "heldout")
PAIRS, STUDENT = Path("runs/pairs-dpo"), Path("runs/pairs-distill")
RANKER, RANKED = Path("runs/pairs-reward"), Path("runs/pairs-reward-grpo")


def run() -> None:
    """Run the recipes in the working directory. Raises the same TiercelErrors as their commands."""
    started = time.monotonic()
    require_recipes(*(f"demo-{name}.yaml" for name in ("dpo", "distill", "reward", "reward-grpo")))
    demo_pointing()
    print(f"5/9 pairs of a careful and a careless box -> {DATA}", flush=True)
    with writing(DATA, "start the demo in a directory that can be written"):
        for seed, name in enumerate(NAMES):
            write_pairs(DATA, name, seed)
    show_command("6/9", "learn from pairs which box is better", "dpo", str(RECIPES / "demo-dpo.yaml"))
    adapter = max((PAIRS / "checkpoints").iterdir()) / "adapter"
    run_command("eval", str(RECIPES / "demo-pointing-grpo.yaml"), "--adapter", str(adapter))
    show_command("7/9", "learn what the demo's trained model says", "distill", str(RECIPES / "demo-distill.yaml"))
    show_command("8/9", "a reward model of the same pairs", "reward", str(RECIPES / "demo-reward.yaml"))
    show_command("9/9", "reinforcement by the reward model alone", "grpo", str(RECIPES / "demo-reward-grpo.yaml"))
    print(summary())
    print(f"{time.monotonic() - started:.0f} s in all; open report.html in {PAIRS}, {STUDENT}, {RANKER} and {RANKED}")


def write_pairs(directory: Path, name: str, seed: int) -> None:
    """Write pairs-NAME.jsonl and labels-NAME.jsonl for the scenes of NAME.jsonl. A pair has a box closer to the true
    one and one further away; a label belongs to one box of each scene."""
    generator = np.random.default_rng(seed)
    pairs, labels = [], []
    for number, line in enumerate((directory / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        for place in range(PAIRS_OF_A_SCENE if name == "practice" else 1):
            better, worse = two_boxes(tuple(row["answer"]), generator)
            pairs.append(answered(row, better) | {"id": f"{row['id']}-{place}", "rejected": written(worse)})
        labels.append(answered(row, worse if number % 2 else better) | {"label": number % 2 == 0})
    write_rows(directory / f"pairs-{name}.jsonl", pairs)
    write_rows(directory / f"labels-{name}.jsonl", labels)


def two_boxes(box: Box, generator: np.random.Generator) -> list[Box]:
    """Draw a careful and a careless box around a digit, and return the better one first."""
    while True:
        drawn = [jittered(box, most, generator) for most in (CAREFUL, CARELESS)]
        drawn.sort(key=lambda each: iou(each, box), reverse=True)
        if iou(drawn[0], box) - iou(drawn[1], box) > LEAST_DIFFERENCE:
            return drawn


def answered(row: Mapping[str, Any], box: Sequence[int]) -> dict[str, Any]:
    """Copy a row, with a box as the assistant's turn."""
    return {**row, "messages": [row["messages"][0], {"role": "assistant", "content": written(box)}]}


def summary() -> str:
    """Return a comparison of before and after, from metrics.jsonl alone. Raises TrainingError if an evaluation is
    missing."""
    pairs, student, teacher, ranker, ranked = map(_accuracies, (PAIRS, STUDENT, TEACHER, RANKER, RANKED))
    steps, best = teacher[-1]
    reached = next((step for step, accuracy in student if accuracy >= 0.9 * best), None)
    return "\n".join(
        [
            f"pairs:    {pairs[0][1]:.3f} -> {pairs[-1][1]:.3f} of the held-out pairs told apart",
            f"teacher:  {teacher[0][1]:.3f} -> {best:.3f} held-out accuracy in {steps} steps of GRPO",
            f"student:  {student[0][1]:.3f} -> {student[-1][1]:.3f} in {student[-1][0]} steps; 0.9 of the teacher's "
            + (f"by step {reached}" if reached is not None else "not reached"),
            f"ranker:   {ranker[0][1]:.3f} -> {ranker[-1][1]:.3f} of the held-out pairs told apart",
            f"by it:    {ranked[0][1]:.3f} -> {ranked[-1][1]:.3f} held-out accuracy in {ranked[-1][0]} steps of GRPO",
        ]
    )


def _accuracies(run: Path) -> list[tuple[int, float]]:
    """Return the steps of a run's evaluations with their accuracies."""
    return [(int(row["step"]), row["eval/accuracy"]) for row in evaluations_of(run, read_metrics(run))]

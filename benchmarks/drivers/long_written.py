"""Made-up files of a long run, with lines as training writes them. The files of steps are links to a few."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.web.report.fake_runs import Scene, completion, group, grpo_metrics, guess, new_run, written_entry
from tiercel.runs.checkpoints import save_checkpoint
from tiercel.runs.records import groups_path

GROUPS, COMPLETIONS, TEMPLATES, ROWS = 4, 8, 48, 96
EVERY_STEP = "row-0"  # the id of the only row that each step samples
EVAL_EVERY, HELD_OUT = 200, 8
RECIPE = """model: {path: Qwen/Qwen2.5-VL-3B-Instruct}
lora: {rank: 64}
data: {train: rec.jsonl, eval: rec_val.jsonl}
optim: {lr: 1.0e-05, prompts_per_step: 4}
train: {steps: STEPS}
output: OUTPUT
rewards: [{name: iou}, {name: format, weight: 0.2}]
rollout: {group_size: 8, max_new_tokens: 64}
"""


def make_written(path: Path, steps: int, seed: int = 0) -> Path:
    """Write a run of `steps` steps that has ended, with one checkpoint."""
    dice = random.Random(seed)
    run = new_run(path, _config(path, steps))
    evaluated = {step: (dice.randint(300, 700), 1024, dice.random()) for step in range(0, steps + 1, EVAL_EVERY)}
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in grpo_metrics(dice, steps, steps, evaluated))
    with (run / "log.txt").open("w", encoding="utf-8") as file:
        file.writelines(_log_lines(dice, steps))
    scenes = [Scene(run, f"scene-{number}", dice, (640, 480)) for number in range(12)]
    sampled = [_Template(_groups(scenes, dice, GROUPS, COMPLETIONS), run, "rollouts") for _ in range(TEMPLATES)]
    held_out = [_Template(_groups(scenes, dice, HELD_OUT, 1), run, "evaluations") for _ in range(4)]
    with (run / "index.jsonl").open("w", encoding="utf-8") as index:
        for step in range(steps + 1):
            if step in evaluated:
                index.write(dice.choice(held_out).at(step))
            if step:
                index.write(dice.choice(sampled).at(step))
    for each in (*sampled, *held_out):
        each.first.unlink()
    (run / ".lock").touch()
    (run / "end.json").write_text('{"exit_code": 0, "reason": ""}', encoding="utf-8")
    save_checkpoint(run / "checkpoints", steps, lambda folder: (folder / "x").write_text("x"), {"loss_scaler": None})
    return run


def make_many(folder: Path, count: int, steps: int) -> Path:
    """Write many short runs whose files are links to those of one."""
    first = make_written(folder / "run-0", steps)
    for number in range(1, count):
        run = folder / f"run-{number}"
        for name in ("rollouts", "evaluations", "images", "checkpoints"):
            (run / name).mkdir(parents=True)
        for name in ("config.yaml", "env.json", "metrics.jsonl", "log.txt", "index.jsonl", "end.json", ".lock"):
            os.link(first / name, run / name)
    return folder


TREE = "TIERCEL_CONFIG_TREE"  # a variable: the checkout whose keys config.yaml has, so that older ones can read it
_PRINT = """
import sys
from tiercel.config import load_recipe, recipe_to_yaml
print(recipe_to_yaml(load_recipe("grpo", sys.argv[1], (), check_paths=False)), end="")
"""


def _config(path: Path, steps: int) -> str:
    """Return a config.yaml with every key, as a run writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    given = path.with_name(f"{path.name}.yaml")
    given.write_text(RECIPE.replace("STEPS", str(steps)).replace("OUTPUT", str(path)), encoding="utf-8")
    here = {**os.environ, "PYTHONPATH": os.environ.get(TREE) or str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", _PRINT, str(given)]
    text = subprocess.run(words, env=here, cwd=path.parent, check=True, capture_output=True, text=True).stdout
    given.unlink()
    return "# tiercel grpo\n" + text


def _log_lines(dice: random.Random, steps: int) -> Iterator[str]:
    yield f"2026-01-01 10:00:00 runs/long: a new run, {steps} steps\n"
    for step in range(1, steps + 1):
        numbers = f"loss {dice.gauss(0, 0.01):+.4f}  reward {dice.random():.3f}  tokens {dice.randint(20, 60)}"
        yield f"2026-01-01 10:00:00 step {step}/{steps}  {numbers}  step 6.05s  left 1:02:03\n"


def _groups(scenes: list[Scene], dice: random.Random, groups: int, completions: int) -> list[dict[str, Any]]:
    made = []
    for number in range(groups):
        scene = dice.choice(scenes)
        answers = [guess(scene, dice, dice.random()) for _ in range(completions)]
        records = [completion(text, rewards, (rewards["iou"] or 0) >= 0.5) for text, rewards in answers]
        for each in records:
            each["token_ids"] = [dice.randrange(150_000) for _ in range(each["tokens"])]
        id = f"row-{dice.randrange(1, ROWS)}" if number else EVERY_STEP
        made.append(group(id, "<image>Where is the dark box?", list(scene.box), [scene.record()], records))
    return made


class _Template:
    """A step's file to which the files of several steps are links."""

    number = 0

    def __init__(self, records: list[dict[str, Any]], run: Path, folder: Any) -> None:
        _Template.number += 1
        self._run, self._folder = run, folder
        self.first = run / folder / f"template-{_Template.number}"
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        self.first.write_text("".join(lines), encoding="utf-8")
        self._entry = json.dumps(written_entry(folder, -1, lines, records)) + "\n"

    def at(self, step: int) -> str:
        """Create the file of a step, and return its line of the index."""
        os.link(self.first, groups_path(self._run, self._folder, step))
        return self._entry.replace('"step": -1', f'"step": {step}', 1)

"""A made-up run of many steps with large rollouts, for measurements of `tiercel view`."""

import json
import random
from pathlib import Path

from tests.web.report.fake_runs import (
    CONFIG,
    Scene,
    completion,
    group,
    grpo_metrics,
    guess,
    new_run,
    write_lines,
    written_entry,
)
from tiercel.runs.files import json_line
from tiercel.runs.index import append_entry
from tiercel.runs.records import groups_path

GROUPS, COMPLETIONS, ROWS = 8, 8, 2000
TEMPLATES = 48
FILLER = "The picture shows several things beside each other, and the question asks for one of them. "
NEEDLE = "a heron among reeds"  # in one completion of every 400th step


def make_long_run(path: Path, steps: int, total_bytes: int, seed: int = 0) -> Path:
    """Write a run of `steps` steps whose rollouts have about `total_bytes` bytes, with its index."""
    dice = random.Random(seed)
    run = new_run(path, CONFIG.replace("STEPS", str(steps)))
    write_lines(run / "metrics.jsonl", grpo_metrics(dice, steps, steps, {0: (300, 1024, 0.3), steps: (700, 1024, 0.7)}))
    scenes = [Scene(run, f"scene-{number}", dice, (640, 480)) for number in range(12)]
    pools = [_templates(scenes, dice, skill / 4, total_bytes // steps // GROUPS) for skill in range(5)]
    with (run / "index.jsonl").open("w", encoding="utf-8") as index:
        for step in range(1, steps + 1):
            records = [dict(dice.choice(pools[4 * step // steps])) for _ in range(GROUPS)]
            for number, record in enumerate(records):
                record |= {"id": f"row-{dice.randrange(ROWS)}", "index": GROUPS * (step - 1) + number}
                record["policy_version"] = step - 1
            if step % 400 == 0:
                first, *others = records[0]["completions"]
                records[0]["completions"] = [{**first, "text": f"{first['text']} {NEEDLE}"}, *others]
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
            groups_path(run, "rollouts", step).write_text("".join(lines), encoding="utf-8")
            index.write(json.dumps(written_entry("rollouts", step, lines, records)) + "\n")
    return run


def add_step(run: Path, step: int) -> None:
    """Write one more step like a run does, from the groups of the previous step."""
    lines = groups_path(run, "rollouts", step - 1).read_text(encoding="utf-8").splitlines(keepends=True)
    groups_path(run, "rollouts", step).write_text("".join(lines), encoding="utf-8")
    append_entry(run, written_entry("rollouts", step, lines, [json.loads(line) for line in lines]))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json_line({"step": step, "reward/mean": 0.5, "time/step": 6.0, "loss": 0.0}))


def _templates(scenes: list[Scene], dice: random.Random, skill: float, group_bytes: int) -> list[dict]:
    made = []
    for _ in range(TEMPLATES):
        scene = dice.choice(scenes)
        answers = [guess(scene, dice, skill) for _ in range(COMPLETIONS)]
        filler = FILLER * (max(0, group_bytes // COMPLETIONS - 700) // (len(FILLER) + 1))
        completions = [
            completion(f"{filler}{text}", rewards, (rewards["iou"] or 0) >= 0.5)
            | {"token_ids": [dice.randrange(150_000) for _ in range(40)]}
            for text, rewards in answers
        ]
        made.append(group("row", "<image>Where is the dark box?", list(scene.box), [scene.record()], completions))
    return made

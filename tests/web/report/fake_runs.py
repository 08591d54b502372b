"""Made-up run directories from a seed, as training writes them: for tests of the report, and for looking at it."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from tiercel.rewards.boxes import iou, to_original
from tiercel.runs.index import add_group, new_entry

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)> \x00\x1b[31m \u202eabc & \"quoted\" 'text'"
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "mine.py", line 3, in score\nZeroDivisionError: division by <zero>\n'
)

SHAPES = [(1280, 960), (640, 480), (96, 96), (480, 900), (1600, 700)]
CONFIG = """# tiercel grpo
model: {path: Qwen/Qwen2.5-VL-3B-Instruct, dtype: bfloat16}
lora: {rank: 64, alpha: 128.0, targets: language}
data: {train: rec.jsonl, eval: rec_val.jsonl}
optim: {lr: 1.0e-05, schedule: constant, prompts_per_step: 4}
train: {steps: STEPS, epochs: null, seed: 0}
output: runs/rec
rewards:
- {name: iou, weight: 1.0}
- {name: format, weight: 0.2}
rollout: {group_size: 8, max_new_tokens: 64, temperature: 1.0}
"""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def new_run(path: Path, config: str) -> Path:
    """config.yaml, env.json and empty folders."""
    for folder in ("rollouts", "evaluations", "images", "checkpoints"):
        (path / folder).mkdir(parents=True)
    (path / "config.yaml").write_text(config, encoding="utf-8")
    environment = {
        "python": "3.11.9",
        "platform": "Linux-6.1-x86_64",
        "packages": {"tiercel": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "cpu_threads": 8,
        "gpus": ["NVIDIA H100 80GB HBM3"],
    }
    (path / "env.json").write_text(json.dumps(environment), encoding="utf-8")
    return path


def wilson(right: int, count: int) -> tuple[float, float]:
    z, share = 1.96, right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


class Scene:
    """A made-up picture with a thing to find: `original` and `processed` sizes, the thing's box in the original."""

    def __init__(self, run: Path, name: str, dice: random.Random, original: tuple[int, int]):
        width, height = original
        self.original = original
        self.processed = (max(28, round(width / 56) * 28), max(28, round(height / 56) * 28))
        self.path = f"images/{name}.jpg"
        size = dice.uniform(0.15, 0.4)
        x, y = dice.uniform(0, 1 - size) * width, dice.uniform(0, 1 - size) * height
        self.box = (round(x), round(y), round(x + size * width), round(y + size * height))
        self.sha256 = hashlib.sha256(name.encode()).hexdigest()
        picture = self._drawn(dice).resize(self.processed)
        picture.save(run / "images" / f"{self.sha256}.png")

    def _drawn(self, dice: random.Random) -> Image.Image:
        def colour(low: int, high: int) -> tuple[int, int, int]:
            return dice.randint(low, high), dice.randint(low, high), dice.randint(low, high)

        zoom = 200 / max(self.original)
        width, height = round(self.original[0] * zoom), round(self.original[1] * zoom)
        image = Image.new("RGB", (width, height), colour(120, 220))
        draw = ImageDraw.Draw(image)
        for _ in range(12):
            x, y, radius = dice.uniform(0, width), dice.uniform(0, height), dice.uniform(0.05, 0.3) * width
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour(60, 240))
        image = image.filter(ImageFilter.GaussianBlur(3))
        ImageDraw.Draw(image).rectangle([side * zoom for side in self.box], fill=colour(0, 90))
        return image

    def record(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "path": self.path,
            "original_size": list(self.original),
            "processed_size": list(self.processed),
        }


def guess(scene: Scene, dice: random.Random, skill: float) -> tuple[str, dict[str, float | None]]:
    """A completion in resized pixels and its rewards; the better the skill, the closer the box."""
    if dice.random() < 0.08 * (1 - skill):
        return "I cannot see it, sorry. " * dice.randint(1, 6), {"iou": 0.0, "format": 0.0}
    scale = scene.processed[0] / scene.original[0], scene.processed[1] / scene.original[1]
    spread = (1.1 - skill) * 0.16
    sides = [
        round(side * scale[axis % 2] + dice.gauss(0, spread) * scene.processed[axis % 2])
        for axis, side in enumerate(scene.box)
    ]
    box = (float(sides[0]), float(sides[1]), float(sides[2]), float(sides[3]))
    overlap = iou(to_original(box, "resized_pixels", scene.original, scene.processed), scene.box)
    is_formed = dice.random() < 0.4 + 0.6 * skill
    text = f"<think>The dark rectangle is what the sentence means.</think><answer>{sides}</answer>"
    return (text if is_formed else f"It is at {sides}."), {"iou": overlap, "format": float(is_formed)}


def completion(text: str, rewards: dict[str, float | None], correct: bool | None, **more: Any) -> dict[str, Any]:
    """A completion's record; `total` is the sum of its rewards, format weighing 0.2."""
    values = [value * (0.2 if name == "format" else 1) for name, value in rewards.items() if value is not None]
    return {
        "text": text,
        "tokens": max(1, len(text) // 4),
        "token_ids": [1, 2, 3],
        "seed": 0,
        "truncated": False,
        "rewards": rewards,
        "failures": {},
        "total": sum(values) if values else None,
        "correct": correct,
        "advantage": None,
        **more,
    }


def group(
    id: str,
    question: str,
    answer: Any,
    images: list[dict[str, Any]],
    completions: list[dict[str, Any]],
    space: str | None = "resized_pixels",
) -> dict[str, Any]:
    """A line of rollouts/ or evaluations/."""
    totals = [each["total"] for each in completions if each["total"] is not None]
    if len(totals) > 1:
        mean = sum(totals) / len(totals)
        spread = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
        for each in completions:
            if each["total"] is not None:
                each["advantage"] = (each["total"] - mean) / (spread + 1e-4)
    record = {
        "id": id,
        "index": 0,
        "policy_version": 0,
        "prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        "question": question,
        "answer": answer,
        "images": images,
        "completions": completions,
    }
    return record if space is None else {**record, "coordinate_space": space}


def grpo_metrics(
    dice: random.Random, steps: int, done: int, evaluations: dict[int, tuple[int, int, float]]
) -> list[dict]:
    """Rows of metrics.jsonl; `evaluations` holds (right, rows, mean reward) by step."""
    rows: list[dict[str, Any]] = []
    for step in range(done + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            progress = 1 - math.exp(-3 * step / steps)
            reward = 0.19 + 0.16 * progress + dice.gauss(0, 0.03)
            learn, rollout = 2.1 + dice.gauss(0, 0.1), 3.5 + dice.gauss(0, 0.2)
            row |= {
                "loss": dice.gauss(0, 0.01),
                "lr": 1e-5,
                "grad_norm": abs(dice.gauss(0.8, 0.2)) + (12 if step == 33 else 0),
                "entropy/mean": 1.4 - 0.8 * progress + dice.gauss(0, 0.04),
                "sampler/logprob_gap_mean": abs(dice.gauss(0.004, 0.001)),
                "clip/low_fraction": 0.0,
                "clip/high_fraction": 0.0,
                "reward/mean": reward + 0.15,
                "reward/std": 0.2,
                "reward/iou/mean": reward,
                "reward/format/mean": min(1.0, 0.6 + 0.4 * progress),
                "reward/failed_fraction": 0.0,
                "reward/masked": int(step % 20 == 0),
                "group/zero_std_fraction": min(1.0, max(0.0, 0.1 + 0.3 * progress + dice.gauss(0, 0.05))),
                "group/dropped": 0,
                "completion/tokens_mean": 40 - 12 * progress + dice.gauss(0, 1),
                "completion/truncated_fraction": max(0.0, 0.1 * (1 - progress) + dice.gauss(0, 0.01)),
                "tokens/prompt": 1600,
                "policy_version": step - 1,
                "rows/rejected": 0,
                "loss_scale/skipped": 0,
                "memory/peak_bytes": 3 << 30,
                "time/rollout": rollout,
                "time/reward": 0.2,
                "time/learn": learn,
                "time/sync": 0.0,
                "time/step": rollout + learn + 0.45,
            }
            row["tokens/completion"] = round(row["completion/tokens_mean"] * 32)
        if step in evaluations:
            right, count, mean = evaluations[step]
            low, high = wilson(right, count)
            row |= {"eval/reward/mean": mean, "eval/count": count, "eval/accuracy": right / count}
            row |= {"eval/accuracy_low": low, "eval/accuracy_high": high, "eval/time": 20.0}
        rows.append(row)
    return rows


def make_grounding(
    path: Path, seed: int = 0, steps: int = 60, done: int | None = None, gain: float = 0.45, rows: int = 48
) -> Path:
    """GRPO on boxes: pictures small and large, hostile text, masked completions, failures, rejected rows."""
    dice = random.Random(seed)
    done = steps if done is None else done
    run = new_run(path, CONFIG.replace("STEPS", str(steps)))
    scenes = [Scene(run, f"val-{number:03d}", dice, SHAPES[number % len(SHAPES)]) for number in range(rows)]
    evaluations = {}
    for step in sorted({0, done // 2, done}):
        lines = [evaluated(number, scene, dice, 0.25 + gain * step / steps) for number, scene in enumerate(scenes)]
        write_lines(run / "evaluations" / f"step-{step:06d}.jsonl", lines)
        greedy = [line["completions"][0] for line in lines]
        right = sum(each["correct"] for each in greedy)
        evaluations[step] = (right, len(lines), sum(each["total"] for each in greedy) / len(lines))
    scenes = [Scene(run, f"train-{number:03d}", dice, SHAPES[number % len(SHAPES)]) for number in range(rows // 2)]
    for step in range(1, done + 1):
        lines = [sampled(step, number, scenes, dice, 0.25 + gain * step / steps) for number in range(4)]
        if step == done:
            lines[0] = with_trouble(lines[0])
            lines[1]["question"] = HOSTILE
        write_lines(run / "rollouts" / f"step-{step:06d}.jsonl", lines)
    write_lines(run / "metrics.jsonl", grpo_metrics(dice, steps, done, evaluations))
    bad = [
        {"id": f"rec-{n}", "file": "rec.jsonl", "line": n, "field": "images", "reason": f"<b>{n}</b>.png: is no image"}
        for n in range(25)
    ]
    write_lines(run / "bad_rows.jsonl", bad)
    (run / "log.txt").write_text(f"2026-01-01 10:00:00 runs/rec: a new run, {steps} steps\n2026-01-01 10:06:00 done\n")
    return run


def evaluated(number: int, scene: Scene, dice: random.Random, skill: float) -> dict[str, Any]:
    text, rewards = guess(scene, dice, skill)
    made = completion(text, rewards, (rewards["iou"] or 0) >= 0.5)
    return group(f"val-{number}", "<image>Where is the dark box?", list(scene.box), [scene.record()], [made])


def sampled(step: int, number: int, scenes: list[Scene], dice: random.Random, skill: float) -> dict[str, Any]:
    scene = scenes[(4 * step + number) % len(scenes)]
    guesses = [guess(scene, dice, skill) for _ in range(8)]
    made = [completion(text, rewards, (rewards["iou"] or 0) >= 0.5) for text, rewards in guesses]
    return group(f"train-{step}-{number}", "<image>Where is it?", list(scene.box), [scene.record()], made)


def with_trouble(record: dict[str, Any]) -> dict[str, Any]:
    """The group with a hostile completion, a failed reward, and a long text with an absurd box."""
    made = list(record["completions"])
    nothing: dict[str, float | None] = {"iou": 0.0, "format": 0.0}
    made[1] = completion(HOSTILE, nothing, False, truncated=True)
    made[2] = completion("<answer>[0, 0, 10, 10]</answer>", {"iou": None, "format": 1.0}, False)
    made[2] |= {"total": None, "failures": {"iou": TRACEBACK}}
    made[3] = completion(f"<answer>[90, 80, 20, 1e300]</answer>{'long ' * 2000}", nothing, False)
    return group(record["id"], record["question"], record["answer"], record["images"], made)


def make_sft(path: Path, steps: int = 200) -> Path:
    """SFT with a held-out loss that turns up again at the end."""
    dice = random.Random(1)
    config = (
        CONFIG.replace("# tiercel grpo", "# tiercel sft").replace("STEPS", "null").replace("epochs: null", "epochs: 2")
    )
    run = new_run(path, config.partition("rewards:")[0])
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {"loss": 0.9 + 1.6 * math.exp(-step / 40) + dice.gauss(0, 0.06), "grad_norm": 1 + dice.random()}
            row |= {"lr": 1e-5 * (1 - step / steps), "entropy/mean": 1.2, "time/step": 1.1, "tokens/completion": 900}
        if step % 50 == 0:
            row |= {"eval/loss": 1.0 + 1.5 * math.exp(-step / 40) + (0.15 if step == steps else 0), "eval/count": 512}
        rows.append(row)
    write_lines(run / "metrics.jsonl", rows)
    (run / "log.txt").write_text(f"2026-01-01 10:00:00 step {steps}/{steps}  loss +0.9\n", encoding="utf-8")
    return run


def make_text(path: Path) -> Path:
    """GRPO without images: answers are text, a number and none; a reward of the user's own answers None."""
    run = new_run(path, CONFIG.replace("STEPS", "4").replace("name: iou", "name: exact"))
    rows = [("What is 6 times 7?", 42), ("Capital of France?", "Paris"), ("Tell me a joke.", None)]
    answers: list[Callable[[int], str]] = [lambda step: str(38 + step), lambda step: "Paris", lambda step: HOSTILE]
    for folder, steps in (("evaluations", (0, 4)), ("rollouts", (1, 2, 3, 4))):
        for step in steps:
            lines = []
            for (question, answer), say in zip(rows, answers, strict=True):
                made = []
                for number in range(1 if folder == "evaluations" else 4):
                    text = say(step - number % 2)
                    exact = None if answer is None else float(text == str(answer))
                    rewards = {"exact": exact, "mine": 0.5 if step else None}
                    made.append(completion(text, rewards, None if exact is None else exact == 1))
                lines.append(group(question[:7], question, answer, [], made, space=None))
            write_lines(run / folder / f"step-{step:06d}.jsonl", lines)
    write_lines(run / "metrics.jsonl", grpo_metrics(random.Random(2), 4, 4, {0: (1, 3, 0.3), 4: (2, 3, 0.9)}))
    return run


def call(name: str, failure: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "failure": failure, "is_known": True}


def turn(
    text: str, calls: Sequence[dict] = (), answer: str | None = None, images: Sequence[dict] = ()
) -> dict[str, Any]:
    return {"start": 0, "stop": 1, "text": text, "calls": list(calls), "answer": answer, "images": list(images)}


def zoomed(run: Path, scene: Scene, box: list[int]) -> dict[str, Any]:
    """What zoom answers: the record of the region, enlarged to the size of the picture. `box`: in thousandths."""
    picture = Image.open(run / "images" / f"{scene.sha256}.png")
    sides = [side * picture.size[axis % 2] / 1000 for axis, side in enumerate(box)]
    size = [round(56 * (box[2] - box[0]) / (box[3] - box[1]) + 28), 84]
    sha256 = hashlib.sha256(f"{scene.sha256}{box}".encode()).hexdigest()
    picture.crop((sides[0], sides[1], sides[2], sides[3])).resize((size[0], size[1])).save(
        run / "images" / f"{sha256}.png"
    )
    return {"sha256": sha256, "path": None, "original_size": size, "processed_size": size}


def trajectory(run: Path, scene: Scene, dice: random.Random, skill: float) -> dict[str, Any]:
    """Zoom towards the thing, look closer or mark a point, answer."""
    box = []
    for axis, side in enumerate(scene.box):
        place = 1000 * side / scene.original[axis % 2] + dice.gauss(0, 250 * (1 - skill)) + (-40 if axis < 2 else 40)
        box.append(min(max(round(place), 0 if axis < 2 else 600), 400 if axis < 2 else 1000))
    first = zoomed(run, scene, box)
    written = json.dumps({"name": "zoom", "arguments": {"box": box, "label": "the dark box"}})
    turns = [
        turn(
            f"The dark box is small.\n<tool_call>{written}</tool_call>",
            [call("zoom", box=box, label="the dark box")],
            "image 2: the dark box\n<image>",
            [first],
        )
    ]
    if dice.random() < 0.5:
        turns.append(turn("Where?", [call("mark", point=[500, 400], image=2)], "image 3\n<image>", [first]))
    if dice.random() > skill:
        problem = "the box [900, 0, 100, 9] has no area"
        turns.append(turn("And there?", [call("crop", problem, box=[900, 0, 100, 9])], f"error: {problem}"))
    is_right = dice.random() < skill
    turns.append(turn("dark" if is_right else "light"))
    return completion(turns[-1]["text"], {"exact": float(is_right), "environment": 0.5}, is_right, turns=turns)


def make_turns(path: Path, steps: int = 12) -> Path:
    """Make a GRPO run with tools: pictures in answers, failed calls, hostile answers, an environment that failed."""
    dice = random.Random(4)
    config = CONFIG.replace("STEPS", str(steps)).replace("name: iou", "name: exact")
    run = new_run(path, config.replace("max_new_tokens: 64", "max_new_tokens: 64, tools: [zoom, mark], max_turns: 6"))
    scenes = [Scene(run, f"turns-{number}", dice, SHAPES[number % len(SHAPES)]) for number in range(8)]

    def lines(prefix: str, count: int, skill: float) -> list[dict[str, Any]]:
        return [
            group(
                f"{prefix}-{number}",
                "<image>Is the box dark or light?",
                "dark",
                [scene.record()],
                [trajectory(run, scene, dice, skill) for _ in range(count)],
                "thousandths",
            )
            for number, scene in enumerate(scenes[:4])
        ]

    for step in (0, steps):
        write_lines(run / "evaluations" / f"step-{step:06d}.jsonl", lines("val", 1, 0.3 + 0.5 * step / steps))
    for step in range(1, steps + 1):
        made = lines(f"train-{step}", 6, 0.3 + 0.5 * step / steps)
        if step == steps:
            made[0] = with_trouble_in_turns(made[0])
        write_lines(run / "rollouts" / f"step-{step:06d}.jsonl", made)
    rows = grpo_metrics(dice, steps, steps, {0: (1, 4, 0.3), steps: (3, 4, 0.9)})
    for row in rows[1:]:
        row |= {"turns/mean": 2 + dice.random(), "tokens/observed": 900, "tools/zoom/calls": 24, "tools/mark/calls": 11}
        row |= {"tools/failed_fraction": dice.uniform(0.5, 0.7), "environment/failed": int(row["step"] == steps)}
    write_lines(run / "metrics.jsonl", rows)
    return run


def with_trouble_in_turns(record: dict[str, Any]) -> dict[str, Any]:
    """The group with hostile answers, a picture that is lost, a picture that was not observed, and a failed
    environment."""
    made = list(record["completions"])
    lost = {"sha256": "0" * 64, "path": None, "original_size": [30, 20], "processed_size": [30, 20]}
    hostile = call(HOSTILE, f"no tool {HOSTILE}", **{HOSTILE: HOSTILE, "box": [1, "2", None, 4], "image": -1})
    turns = [
        turn("Look.", [hostile], f"{HOSTILE}<image>{HOSTILE}", [lost]),
        turn("", [{**call("", "cannot be read"), "is_known": False}], ""),
        turn("Again.", [call("zoom", box=[0, 0, 1e308, -5], image=2)], "image 3<image>"),
    ]
    made[0] = completion("Again.", {"exact": 0.0, "environment": 0.0}, False, truncated=True, turns=turns)
    made[1] = completion("Ask.", {"exact": None, "environment": None}, None, turns=[turn("Ask.")])
    made[1]["failures"] = dict.fromkeys(("exact", "environment"), f"mine.py:Env, row 7: step: {TRACEBACK}")
    return group(record["id"], record["question"], record["answer"], record["images"], made, "thousandths")


def make_empty(path: Path) -> Path:
    """A run that has just been started."""
    return new_run(path, CONFIG.replace("STEPS", "400"))


def cut_last_lines(run: Path) -> None:
    """What a crash does: the last line of metrics and of the newest rollout ends in the middle."""
    for file in (run / "metrics.jsonl", max((run / "rollouts").iterdir())):
        text = file.read_text(encoding="utf-8")
        file.write_text(text[:-40], encoding="utf-8")


if __name__ == "__main__":
    import sys

    from tiercel.web.report import write_report

    root = Path(sys.argv[1])
    first = make_grounding(root / "grounding")
    others = [make_turns(root / "turns"), make_sft(root / "sft"), make_text(root / "text"), make_empty(root / "empty")]
    for made in others:
        print(write_report(made))
    print(write_report(first))
    unfinished = make_grounding(root / "cut", seed=3, done=37)
    cut_last_lines(unfinished)
    print(write_report(unfinished))


def written_entry(folder, step: int, lines, records) -> dict[str, Any]:
    """Build the index entry of a step's file whose lines were just made from these records."""
    entry, start = new_entry(folder, step), 0
    for line, record in zip(lines, records, strict=True):
        size = len(line.encode("utf-8"))
        add_group(entry, start, size, record)
        start += size
    return entry

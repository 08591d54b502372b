"""What a run of GRPO writes in a step, and the host memory that a prompt takes: `python -m benchmarks.run_sizes`.

Pictures are like photographs: gradients, structure of every size and a sensor's noise. Completions are parts of the
repository's own pages, cut into words and signs of at most six characters as tokens, so that texts and ids are about as
hard to compress as those of a model.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from tests.web.report.fake_runs import written_entry
from tiercel.config.schema import GrpoRecipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.loader import StepLoader, StepOrder
from tiercel.data.reading import read_run_rows
from tiercel.models.families.loading import family_of
from tiercel.runs.files import json_line
from tiercel.runs.pictures import write_picture
from tiercel.runs.records import CompletionRecord, GroupRecord, GroupTokens, ImageRecord, TokenRecord
from tiercel.runs.step_files import pack_step

ROOT = Path(__file__).parents[1]
SIDE = 1024
PROMPTS, GROUP, KEPT = 16, 8, 4
STEPS = 10_000
RECIPE = {
    "lora": {"rank": 4, "alpha": 8},
    "rewards": [{"name": "length", "max_tokens": 3}],
    "rollout": {"group_size": 5, "max_new_tokens": 4},
    "train": {"steps": 3, "threads": 1},
}


def photograph(seed: int) -> np.ndarray:
    """Return a picture, uint8 (SIDE, SIDE, 3)."""
    random_bits = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    slopes = random_bits.uniform(-120, 120, (2, 3))
    picture = 128 + slopes[0] * (x[..., None] - 0.5) + slopes[1] * (y[..., None] - 0.5)
    for power in range(2, 9):
        coarse = random_bits.integers(0, 256, (2**power, 2**power, 3), dtype=np.uint8)
        fine = np.asarray(Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=float)
        picture += (fine - 128) * 1.2 / 2 ** (power / 2)
    return np.clip(picture + random_bits.normal(0, 5, (SIDE, SIDE, 1)), 0, 255).astype(np.uint8)


def step_bytes(tokens: int) -> dict[str, int]:
    """Return the bytes of a step with completions of this many tokens, as they are after 100 further steps."""
    made = random.Random(tokens)
    page = "\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    pieces = re.findall(r" ?\w{1,6}|[^\w]", page)
    groups, notes = [], []
    for index in range(PROMPTS):
        parts = [pieces[place : place + tokens] for place in made.sample(range(len(pieces) - tokens), GROUP)]
        question = "".join(made.choices(pieces, k=50))
        image = ImageRecord(
            sha256=f"{made.getrandbits(256):064x}",
            path=f"{index}.jpg",
            original_size=(SIDE, SIDE),
            processed_size=(SIDE, SIDE),
        )
        groups.append(
            GroupRecord(
                id=f"rows:{index}", index=index, policy_version=7, prompt=question + "<image>", question=question,
                answer=[1, 2, 3, 4], images=(image,), completions=tuple(_completion(part, made) for part in parts),
            )
        )  # fmt: skip
        if index < KEPT:
            notes.append(GroupTokens(index=index, completions=tuple(_tokens(part, made) for part in parts)))
    with tempfile.TemporaryDirectory() as place:
        run, records = Path(place), [group.as_json() for group in groups]
        lines = [json_line(record) for record in records]
        texts = {"rollouts": lines, "tokens": [json_line(note.as_json()) for note in notes]}
        for folder, written in texts.items():
            (run / folder).mkdir()
            (run / folder / "step-000001.jsonl").write_text("".join(written), encoding="utf-8")
        pack_step(run, 1)
        (run / "images").mkdir()
        for number in range(KEPT):
            write_picture(run / "images" / f"{number}.webp", photograph(number), run / "images" / "new.tmp")
        found = {folder.name: sum(f.stat().st_size for f in folder.iterdir()) for folder in sorted(run.iterdir())}
    return {**found, "index.jsonl": len(json_line(written_entry("rollouts", 1, lines, records)))}


def _completion(part: list[str], made: random.Random) -> CompletionRecord:
    return CompletionRecord(
        text="".join(part), tokens=len(part), token_ids=tuple(zlib.crc32(each.encode()) % 151_936 for each in part),
        seed=made.getrandbits(62), is_truncated=False, rewards={"iou": made.random(), "format": 1.0}, failures={},
        total=made.random(), is_correct=True, advantage=made.gauss(0, 1),
    )  # fmt: skip


def _tokens(part: list[str], made: random.Random) -> TokenRecord:
    numbers = [
        [round(value, 3) for value in (-made.expovariate(2), made.expovariate(2), made.gauss(0, 0.01))] for _ in part
    ]
    logprobs, entropies, gaps = map(tuple, zip(*numbers, strict=True))
    return TokenRecord(texts=tuple(part), logprobs=logprobs, entropies=entropies, gaps=gaps)


def write_recipe(prompts: int, work: Path) -> Path:
    """Write a recipe that trains a tiny model on steps of this many prompts with a picture each."""
    from tests.tiny_models import save_tiny_checkpoint

    checkpoint = save_tiny_checkpoint("qwen2_5_vl", work / "model")
    rows = []
    for number in range(prompts):
        Image.fromarray(photograph(number)).save(work / f"{number}.jpg", quality=90)
        messages = [{"role": "user", "content": "<image>Where?"}]
        rows.append({"id": str(number), "images": [f"{number}.jpg"], "messages": messages, "answer": "x"})
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **RECIPE,
        "model": {"path": str(checkpoint), "dtype": "float32", "max_pixels": SIDE * SIDE},
        "data": {"train": str(work / "rows.jsonl"), "workers": 2},
        "optim": {"prompts_per_step": prompts},
        "output": str(work / "run"),
    }
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    return work / "recipe.yaml"


def hold_steps(file: Path) -> None:
    """Read the steps of a recipe as a run does, which learns from one while workers encode the next ones."""
    recipe = GrpoRecipe.model_validate(json.loads(file.read_text()))
    table = read_run_rows(recipe.data, recipe.purpose).train
    rows = table.order(recipe.train.seed, recipe.data)
    order = StepOrder(rows=rows, prompts_per_step=recipe.optim.prompts_per_step)
    encode = prompt_encoder(family_of(recipe), recipe.data)
    with StepLoader(table.rows, encode, order, start=0, stop=9, workers=recipe.data.workers) as loader:
        for _, held in zip(range(4), loader, strict=False):
            time.sleep(1 + len(held.prompts) / 2)


def most_bytes(*command: str) -> int:
    """Run a command; return the most memory that its processes had together, each shared page counted once."""
    process, most = subprocess.Popen([sys.executable, "-m", *command], start_new_session=True), 0
    while process.poll() is None:
        most = max(most, sum(_own_bytes(number) for number in _session(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return most


def _session(leader: int) -> list[int]:
    found = []
    for number in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.getsid(number) == leader:
                found.append(number)
        except OSError:
            pass
    return found


def _own_bytes(number: int) -> int:
    """Return a process's proportional share of memory."""
    try:
        lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 128, 256], help="of a completion")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="of a step, to measure the host's memory")
    parser.add_argument("--train", action="store_true", help="measure a whole run of a tiny model too")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for tokens in asked.tokens:
        found = step_bytes(tokens)
        print(f"{tokens} tokens: {found}, {STEPS:,} steps {sum(found.values()) * STEPS / 1e9:.2f} GB", flush=True)
    for prompts in asked.prompts:
        with tempfile.TemporaryDirectory() as work:
            file = write_recipe(prompts, Path(work))
            held = most_bytes("benchmarks.run_sizes", "--tokens", "--hold", str(file))
            whole = most_bytes("tiercel", "grpo", str(file)) if asked.train else 0
        print(
            f"{prompts} prompts: {held / 1e6:,.0f} MB to hold them, {whole / 1e6:,.0f} MB with a CPU's model",
            flush=True,
        )
    if asked.hold:
        hold_steps(asked.hold)


if __name__ == "__main__":
    main()

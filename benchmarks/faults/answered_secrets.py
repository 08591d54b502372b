"""Secrets that tools, an environment, a reward and a judge return, raise and print: none is in any file of the run, not
even as token ids; and the user's code finds none in its environment, or in that of the trainer.

    python -m benchmarks.faults --only "secrets in answers"
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import FAMILY
from tests.calling_models import call, save_calling_checkpoint
from tests.reliability.test_run_secrets import MARK
from tests.reliability.test_run_secrets import SECRETS as OF_REWARDS
from tests.tiny_models import save_tiny_checkpoint
from tests.training.turn_recipes import turn_recipe
from tiercel.config import recipe_to_yaml
from tiercel.errors import EXIT_DONE, EXIT_TRAINING

PROXY = f"http://service:{MARK}%2Fproxy{os.getpid()}@127.0.0.1:9"  # no other process has this value
SECRETS = {**OF_REWARDS, "HTTPS_PROXY": PROXY, "VENDOR_KEY": "0123456789" * 12 + MARK}
FORMS = 5  # in which a secret is returned
CALLS = [
    *(call(name, form=form) for name in ("tell", "refuse", "show") for form in range(FORMS)),
    *(call("beside", form=form) for form in range(FORMS)),
]
KNOWN = """
import json
import os
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "known.json").read_text())
FORMS = (
    " ".join(KNOWN.values()), repr(KNOWN), json.dumps(KNOWN), f"curl -x {KNOWN['HTTPS_PROXY']}", KNOWN["VENDOR_KEY"],
)


def seen():
    \"\"\"Note the secrets that this process finds in a process's environment.\"\"\"
    found = [name for name, value in os.environ.items() if "MARK" in value]
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [str(place)] * (f"HTTPS_PROXY={KNOWN['HTTPS_PROXY']}".encode() in place.read_bytes())
        except OSError:
            pass
    with (HERE / "seen.txt").open("a") as file:
        file.write(f"{found}\\n")


def beside(form: int) -> str:
    \"\"\"Tell one of FIRST.

    Args:
        form: Its number.
    \"\"\"
    seen()
    return FORMS[form]


class Env:
    \"\"\"Tells what it should not.\"\"\"

    def reset(self, **row):
        self.turns = 0
        return " Known: " + FORMS[0]

    def tell(self, form: int) -> list:
        \"\"\"Tell one of FIRST.

        Args:
            form: Its number, not SECOND.
        \"\"\"
        print(FORMS[form])
        half = len(FORMS[form]) // 2
        parts = [{"type": "text", "text": text} for text in (FORMS[form][:half], FORMS[form][half:])]
        return [*parts, {"type": "image", "image": Image.new("RGB", (56, 56), (form, 9, 9))}]

    def refuse(self, form: int) -> str:
        \"\"\"Refuse.

        Args:
            form: Its number.
        \"\"\"
        raise ValueError(FORMS[form])

    def show(self, form: int) -> dict:
        \"\"\"Show.

        Args:
            form: Its number.
        \"\"\"
        return {"known": FORMS[form]}

    def respond(self, completion: str):
        self.turns += 1
        if len(completion) % 7 == 0:
            raise KeyError(FORMS[1])
        return FORMS[len(completion) % 5]

    def get_reward(self) -> float:
        return 0.5


def score(sample):
    seen()
    print(FORMS[2])
    form = len(sample.completion) % 4
    if form == 1:
        raise LookupError(FORMS[0], FORMS[3])
    return FORMS[4] if form == 2 else KNOWN if form == 3 else 1.0
"""
MOST_SECONDS = 300


def answered_secrets(size: Size, seed: int, work: Path) -> Figure:
    """Train with all of them, resume, and give up, and search what was written after each."""
    started = time.perf_counter()
    tiny = save_tiny_checkpoint(FAMILY, work / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(save_calling_checkpoint(tiny, work / "model", CALLS))
    write_code(work)
    outcomes: list[Outcome] = []
    files = decoded = marks = 0
    commands: dict[str, tuple[list[str], int]] = {
        "a run": ([], EXIT_DONE),
        "going on": (["train.steps=4"], EXIT_DONE),
        "too many failed rewards": (["train.steps=5", "reliability.max_failed_reward_fraction=0"], EXIT_TRAINING),
    }
    with judging() as url:
        recipe = recipe_file(work, url)
        for name, (words, code) in commands.items() if size == "full" else list(commands.items())[:1]:
            outcomes += _printed(name, ["-m", "tiercel", "grpo", str(recipe), *words], code)
            for file in sorted(path for path in (work / "run").rglob("*") if path.is_file()):
                texts = token_texts(file, tokenizer.decode)
                files, decoded = files + 1, decoded + len(texts)
                marks += sum(text.count("[redacted") for text in texts)
                found = file.read_bytes().count(MARK.encode()) + sum(text.count(MARK) for text in texts)
                place = file.relative_to(work / "run")
                outcomes.append((f"{name}, {place}", f"{found} secrets were written" if found else None))
    looks = (work / "seen.txt").read_text(encoding="utf-8").splitlines()
    outcomes += [("what the user's code sees", None if look == "[]" else f"it saw {look}") for look in looks]
    outcomes.append(("token ids were searched", None if decoded and marks else "no secret came that far"))
    return figure_of(
        "secrets in answers",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "secrets": len(SECRETS),
            "files_searched": files,
            "token_sequences_decoded": decoded,
            "marks_in_tokens": marks,
            "looks_at_environments": len(looks),
        },
    )


def write_code(work: Path) -> None:
    """Write the user's code, and the secrets that it knows from elsewhere."""
    (work / "known.json").write_text(json.dumps(SECRETS), encoding="utf-8")
    source = KNOWN.replace("MARK", MARK).replace("FIRST", SECRETS["HF_TOKEN"]).replace("SECOND", PROXY)
    (work / "telling.py").write_text(source, encoding="utf-8")


def recipe_file(work: Path, judge: str) -> Path:
    """Write a recipe with tools, an environment, a reward and a judge that all leak secrets."""
    recipe = turn_recipe(
        work / "model",
        work,
        "run",
        data={"max_prompt_tokens": 4000},
        rewards=[
            {"name": "environment"},
            {"call": f"{work}/telling.py:score"},
            {"name": "judge", "judge": {"url": judge, "model": "judge", "retries": 0}},
        ],
        rollout={
            "environment": f"{work}/telling.py:Env",
            "tools": [f"{work}/telling.py:beside"],
            "max_trajectory_tokens": 8000,
            "max_new_tokens": 20,
        },
        learner={"max_tokens_per_microbatch": 16000},
        reliability={"max_failed_reward_fraction": 1.0},
    )
    file = work / "recipe.yaml"
    file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    return file


@contextmanager
def judging() -> Iterator[str]:
    """Serve a judge whose replies contain secrets: a grade, none, no chat completion, an error. Yields its address."""
    known = " ".join(SECRETS.values())
    chats = (f"<answer>5</answer>{known}", f"No grade: {known}", "7")
    bodies: list[tuple[int, Any]] = [(200, {"choices": [{"message": {"content": chat}}]}) for chat in chats]
    replies = cycle([*bodies, (200, {"choices": known}), (400, {"error": SECRETS})])

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = next(replies)
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def token_texts(file: Path, decode: Callable[[list[int]], str]) -> list[str]:
    """Decode every sequence of token ids in a file."""
    if file.suffix == ".safetensors":
        found = load_file(file).items()
        return [decode(tensor.flatten().tolist()) for name, tensor in found if "token_ids" in name]
    if file.suffix != ".jsonl":
        return []
    lists = re.findall(r'"token_ids": \[([0-9, ]+)\]', file.read_text(encoding="utf-8"))
    return [decode([int(number) for number in numbers.split(",")]) for numbers in lists]


def _printed(name: str, words: list[str], code: int) -> Iterator[Outcome]:
    own = {key: value for key, value in os.environ.items() if MARK not in value}
    done = subprocess.run(
        [sys.executable, *words],
        env={**own, **SECRETS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=MOST_SECONDS,
        check=False,
    )
    said = done.stdout + done.stderr
    problem = f"{said.count(MARK)} secrets were printed" if MARK in said else None
    if done.returncode != code:
        problem = f"exit code {done.returncode}, not {code}: {said[-800:]}"
    yield f"{name}, printed", problem

"""A whole run with secrets in environment, recipe and rows: none is in anything that it writes or prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.runs.directory import read_metrics

MARK = "canary"  # in every secret, and in nothing else
SECRETS = {
    "OPENAI_API_KEY": f"sk-{MARK}-openai-1234",
    "HF_TOKEN": f"hf_{MARK}hub5678",
    "MY_SECRET": f'two "lines" of\n{MARK} with <quotes> and é',
    "db_password": f"{MARK}!database",
    "DATABASE": f"postgres://service:{MARK}%40url@host:5432/db",
}
REWARD = """
def score(sample):
    columns = sample.columns
    print("asking", columns["service"], "by", columns["api_key"])
    if columns["is_refused"]:
        raise ValueError(f"{columns['service']} refuses {columns['api_key']}, {columns['handed']!r}")
    return len(set(sample.completion)) / 10
"""
CRASHING = """
import os
import sys
import threading

from tiercel.cli.main import entry_point
from tiercel.training.grpo import minibatch_updates as grpo

learn, calls = grpo.learn, []


def learn_once(*arguments):
    calls.append(arguments)
    if len(calls) == 1:
        return learn(*arguments)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    fail()


def fail():
    raise LookupError(f"{os.environ['MY_SECRET']} {os.environ['DATABASE']}", dict(os.environ))


grpo.learn = learn_once
sys.argv[0] = "tiercel"
entry_point()
"""


def write_rows(directory: Path) -> Path:
    """Twelve rows whose columns hold secrets: every third is refused, the last names no image."""
    lines = []
    for number in range(12):
        text = f"See https://me:{MARK}-row@host/ here."
        row = {
            "id": f"row-{number}",
            "messages": [{"role": "user", "content": text}],
            "images": [f"{SECRETS['db_password']}.png"] if number == 11 else [],
            "answer": "[1, 2]",
            "service": f"https://me:{MARK}-column@host/v1?token={MARK}",
            "api_key": f"{MARK}-of-a-column",
            "handed": SECRETS["OPENAI_API_KEY"] + SECRETS["MY_SECRET"],
            "is_refused": number % 3 == 1,
        }
        lines.append(json.dumps(row))
    (directory / "mine.py").write_text(REWARD)
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "rows.jsonl"


def write_recipe(checkpoint: Path, directory: Path) -> Path:
    """Write a recipe file next to its rows and its reward."""
    recipe = grpo_recipe(
        checkpoint,
        write_rows(directory),
        directory / "run",
        data={
            "eval": None,
            "workers": 1,
            "max_prompt_tokens": 400,
            "max_bad_fraction": 0.5,
            "system": f"https://me:{MARK}-recipe@host/?api_key={MARK} is where to ask.",
        },
        rewards=[{"call": f"{directory}/mine.py:score"}],
        rollout={"group_size": 2, "max_new_tokens": 4},
        learner={"max_tokens_per_microbatch": 2000},
        train={"steps": 3, "save_every": 1, "threads": 1},
        reliability={"max_failed_reward_fraction": 1.0},
    )
    path = directory / "recipe.yaml"
    path.write_text(recipe_to_yaml(recipe))
    return path


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path, monkeypatch) -> Path:
    """With the secrets in the environment."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return write_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path)


def leaks(run: Path) -> list[str]:
    return [str(path) for path in run.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]


@pytest.mark.catalogue
def test_a_run_that_fails_crashes_and_goes_on_writes_no_secret(recipe, capfd):
    run = recipe.parent / "run"
    crashed = subprocess.run(
        [sys.executable, "-c", CRASHING, "grpo", str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert crashed.returncode == 1 and crashed.stderr.count("LookupError: ") == 2, crashed.stderr
    assert "'OPENAI_API_KEY': '[redacted OPENAI_API_KEY]'" in crashed.stderr
    assert MARK not in crashed.stdout + crashed.stderr
    assert leaks(run) == []

    assert main(["grpo", str(recipe)]) == 0
    said = capfd.readouterr()
    assert "going on from step 1" in said.err
    assert MARK not in said.out + said.err
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    assert leaks(run) == []

    rollouts = "".join(path.read_text() for path in (run / "rollouts").iterdir())
    assert "refuses [redacted api_key], '[redacted OPENAI_API_KEY][redacted MY_SECRET]'" in rollouts
    assert "https://redacted@host/v1?token=redacted" in rollouts
    assert "https://redacted@host/?api_key=redacted is where to ask." in (run / "config.yaml").read_text()
    assert "[redacted db_password].png" in (run / "bad_rows.jsonl").read_text()
    assert "[redacted OPENAI_API_KEY]" in (run / "report.html").read_text()


def test_what_a_command_says_of_a_failure_has_no_secret(recipe, capfd):
    words = [str(recipe), "reliability.max_failed_reward_fraction=0"]
    assert main(["grpo", *words]) == 3
    refused = capfd.readouterr()
    assert "refuses [redacted api_key]" in refused.err and "asking https://redacted@host" in refused.err
    assert main(["check", *words]) == 3  # its reward fails here too
    checked = capfd.readouterr()
    assert "[redacted db_password].png" in checked.out
    assert main(["check", *words, f"hf_token={SECRETS['HF_TOKEN']}", f"a.other_token={MARK}{MARK}"]) == 2
    wrong = capfd.readouterr()
    assert "a.other_token: unknown key (its value is [redacted])" in wrong.err
    with pytest.raises(SystemExit):
        main(["check", *words, f"--{SECRETS['db_password']}"])
    for said in (refused, checked, wrong, capfd.readouterr()):
        assert MARK not in said.out + said.err
    assert leaks(recipe.parent / "run") == []

"""Every flag is honoured, or refused with the reason."""

import argparse
import subprocess
import sys

import pytest

from tests.cli.commands import leaves
from tiercel.cli.arguments import build_parser, rank_options
from tiercel.cli.main import main, parse
from tiercel.cli.values import size


def refusal(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(build_parser(), words)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", ([], ["data"]))
def test_without_a_command_the_help_is_printed(words):
    done = subprocess.run([sys.executable, "-m", "tiercel", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"usage: {' '.join(['tiercel', *words])} ")


@pytest.mark.parametrize(
    ("text", "byte_count", "shown"),
    [
        ("80GB", 80 * 10**9, "80GB"),
        ("80 gb", 80 * 10**9, "80 gb"),
        ("1.5GiB", 3 * 2**29, "1.5GiB"),
        ("81559MiB", 81559 * 2**20, "81559MiB"),
        ("80", 80 * 10**9, "80 GB"),
        ("2TB", 2 * 10**12, "2TB"),
    ],
)
def test_sizes_have_units_and_gigabytes_without_one(text, byte_count, shown):
    read = size(text)
    assert (read.byte_count, read.text, read.is_assumed) == (byte_count, shown, text == "80")


@pytest.mark.parametrize("text", ("lots", "80B", "80KB", "80 GHz", "80MB", "0", "-80GB", "1.2.3GB", "", "nan", "1e3GB",
                                  "85899345920", "200TB"))  # fmt: skip
def test_what_is_no_memory_of_a_gpu_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a size such as 80GB"):
        size(text)


WRONG_FLAGS = {
    "grpo r.yaml --nproc 0": "argument --nproc: is 0, but must be a whole number, 1 or more",
    "grpo r.yaml --nproc -2": "argument --nproc: is -2, but must be a whole number, 1 or more",
    "sft r.yaml --max-restarts -1": "argument --max-restarts: is -1, but must be a whole number, 0 or more",
    "eval r.yaml --nproc two": "argument --nproc: is two, but must be a whole number, 1 or more",
    "eval r.yaml --adapter gone": "argument --adapter: gone is not a directory",
    "plan r.yaml --gpus 0": "argument --gpus: is 0, but must be a whole number, 1 or more",
    "plan r.yaml --gpu-memory 80B": "argument --gpu-memory: is 80B, but must be a size such as 80GB",
    "plan r.yaml --host-memory 1MB": "argument --host-memory: 1MB is less than 1 GB; use a size such as 80GB",
    "plan r.yaml --prompt-tokens 0": "argument --prompt-tokens: is 0, but must be a whole number, 1 or more",
    "plan r.yaml --device tpu": "argument --device: invalid choice: 'tpu'",
    "data preview r.yaml --rows 0": "argument --rows: is 0, but must be a whole number, 1 or more",
    "serve r.yaml --port 99999": "argument --port: is 99999, but a port must be between 1 and 65535",
    "serve r.yaml --port 0": "argument --port: is 0, but must be a whole number, 1 or more",
    "serve r.yaml --vllm=--seed='1": "argument --vllm: --seed='1 cannot be read as words",
    "predict m prompt --max-new-tokens -5": "argument --max-new-tokens: is -5, but must be a whole number, 1 or more",
    "predict m prompt --max-new-tokens 0": "argument --max-new-tokens: is 0, but must be a whole number, 1 or more",
    "predict m prompt --adapter gone": "argument --adapter: gone is not a directory",
    "replay runs/x --step -1": "argument --step: is -1, but must be a whole number, 0 or more",
    "replay runs/x --step 1.5": "argument --step: is 1.5, but must be a whole number, 0 or more",
}


@pytest.mark.parametrize("line", WRONG_FLAGS)
def test_a_flag_that_makes_no_sense_is_refused_with_the_reason(line, capsys):
    assert WRONG_FLAGS[line] in refusal(capsys, *line.split())


def test_no_flag_takes_any_number_whatever():
    types = {
        (words, action.dest): action.type for words, parser in leaves(build_parser()) for action in parser._actions
    }
    assert not [place for place, kind in types.items() if kind in (int, float)]
    assert {kind for (_, name), kind in types.items() if name.endswith("memory")} == {size}


def test_flags_that_have_no_effect_are_refused(tmp_path, capsys):
    assert main(["check", "r.yaml", "--report-file", "rows.jsonl"]) == 2
    assert "--report-file: is set, but --fix-report is not" in capsys.readouterr().err
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: m/m}\ndata: {train: rows.jsonl, max_prompt_tokens: 100}\ntrain: {steps: 1}\noutput: run\n"
    )
    assert main(["plan", str(recipe), "--prompt-tokens", "101"]) == 2
    assert "--prompt-tokens: is 101, but must be at most data.max_prompt_tokens (100)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("grpo r.yaml --nproc 3 optim.lr=1 --max-restarts=2 train.steps=2", "grpo r.yaml optim.lr=1 train.steps=2"),
        ("eval --adapter a runs/x --nproc=2", "eval --adapter a runs/x"),
    ],
)
def test_ranks_get_the_command_without_what_is_the_launchers(line, ranks):
    assert rank_options().parse_known_args(line.split())[1] == ranks.split()

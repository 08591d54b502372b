"""The words of the command line: completion by real shells."""

import argparse
import subprocess

import pytest

from tiercel.cli.main import COMMANDS, _wants_ranks, main
from tiercel.errors import RecipeError


def test_a_shell_completes_commands_options_and_files(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion.sh"
    (tmp_path / "recipe.yaml").touch()
    asked = [
        ("tiercel", ""),
        ("tiercel", "plan", "--gp"),
        ("tiercel", "sft", "rec"),
    ]
    script.write_text(capsys.readouterr().out)
    for words in asked:
        typed = " ".join(word or repr(word) for word in words)
        ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_tiercel"
        command = f"source {script}; {ask}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=True)
        found = set(run.stdout.split())
        if words[-1] == "":
            assert found >= COMMANDS.keys()
        else:
            assert found == ({"--gpus", "--gpu-memory"} if words[-1] == "--gp" else {"recipe.yaml"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--learning_rate", "1e-5"], "--learning_rate 1e-5; use optim.lr=1e-5"),
        (["--learning-rate=1e-5"], "--learning-rate=1e-5; use optim.lr=1e-5"),
        (["train.steps=3", "--num_generations", "8"], "use rollout.group_size=8"),
        (["--num_generations", "--use_peft"], "use rollout.group_size=VALUE"),
        (["--bf16"], "unrecognized arguments: --bf16; use model.dtype (set model.dtype: bfloat16)"),
        (["--qqzzq", "1"], "unrecognized arguments: --qqzzq 1\n"),
    ],
)
def test_a_flag_of_another_framework_gets_the_hint_of_the_key(words, told, capsys):
    for verb in ("grpo", "check"):
        with pytest.raises(SystemExit, match="2"):
            main([verb, "recipe.yaml", *words])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["grpo", "sft", "check", "plan"])
def test_a_command_alone_asks_for_the_recipe_only(verb, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([verb])
    assert capsys.readouterr().err.endswith("the following arguments are required: recipe\n")


def test_only_a_launcher_keeps_nproc_from_starting_ranks(monkeypatch):
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # left over from something else
    assert _wants_ranks(argparse.Namespace(nproc=2))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RecipeError, match="a launcher has already started"):
        _wants_ranks(argparse.Namespace(nproc=2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _wants_ranks(argparse.Namespace(nproc=2))

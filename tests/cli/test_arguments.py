"""The words of the command line: completion by real shells."""

import subprocess

import pytest

from tiercel.cli.main import COMMANDS, main


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

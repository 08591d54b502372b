"""A step's rollouts as text."""

import pytest

from tests.web.report.fake_runs import HOSTILE, completion, group, write_lines
from tiercel.api.run import Run
from tiercel.cli.main import main
from tiercel.web.report.rollout_table import WIDTH


@pytest.fixture
def run(tmp_path):
    rows = [
        group(f"row-{number}", "Which one?", "7", [], [completion(text, {"exact": reward}, reward > 0)])
        for number, (text, reward) in enumerate((("6", 0.0), ("7", 1.0), (HOSTILE * 3, 0.0)))
    ]
    (tmp_path / "config.yaml").write_text("# tiercel grpo\n")
    for step in (1, 2):
        write_lines(tmp_path / "rollouts" / f"step-{step:06d}.jsonl", rows[: step + 1])
    return tmp_path


def test_each_completion_is_a_line_without_control_characters(run):
    text = repr(Run(run).rollouts())
    assert text.count("Which one?") == 3 and text.replace("\n", "").isprintable()
    lines = [line for line in text.splitlines() if line.endswith("  7")]
    assert len(lines) == 1 and "1.000" in lines[0]
    assert max(map(len, text.splitlines())) < WIDTH + 40
    assert len(Run(run).rollouts(1)) == 2 and Run(run).rollouts(5) == () and repr(Run(run).rollouts(5)) == "no rollouts"


def test_the_command_prints_the_newest_step_and_says_how_many_more(run, capsys):
    assert main(["rollouts", str(run), "--prompts", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("Which one?") == 2 and "--prompts 3" in out


@pytest.mark.parametrize("words", [("--step", "3"), ()])
def test_a_step_or_a_run_without_rollouts_is_refused(run, capsys, words):
    folder = run if words else run / "rollouts"
    assert main(["rollouts", str(folder), *words]) == 2
    assert ("steps 1 to 2" if words else "config.yaml") in capsys.readouterr().err

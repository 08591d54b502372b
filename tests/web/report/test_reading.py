import json

import pytest

from tests.web.report.fake_runs import (
    completion,
    cut_last_lines,
    group,
    make_empty,
    make_grounding,
    make_sft,
    write_lines,
)
from tiercel.errors import RunError
from tiercel.web.report.reading import read_groups, read_run


def test_a_directory_without_config_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"has no config\.yaml"):
        read_run(tmp_path)


def test_a_run_that_has_just_started(tmp_path):
    run = read_run(make_empty(tmp_path / "run"))
    assert (run.kind, run.last_step, run.total_steps) == ("grpo", 0, 400)
    assert tuple(run.metrics) == run.bad_rows == run.rollout_steps == run.evaluation_steps == ()


def test_a_cut_line_is_left_out_and_counted(tmp_path):
    path = make_grounding(tmp_path / "run", steps=4, rows=4)
    cut_last_lines(path)
    run = read_run(path)
    assert run.last_step == 3
    assert run.unreadable == {"metrics.jsonl": 1}
    file = read_groups(run, "rollouts", 4)
    assert (len(file.groups), file.unreadable) == (3, 1)


def test_steps_of_a_run_by_epochs_come_from_its_log(tmp_path):
    run = read_run(make_sft(tmp_path / "run", steps=50))
    assert (run.kind, run.total_steps) == ("sft", 50)


def test_what_a_reward_printed_into_the_log_is_no_number_of_steps(tmp_path):
    path = make_sft(tmp_path / "run", steps=50)
    with (path / "log.txt").open("a") as log:
        log.write("2026-01-01 10:07:00 mine.py:score printed:\n  step 3/999\n")
    assert read_run(path).total_steps == 50


@pytest.mark.parametrize(
    "broken",
    [
        {"images": [{"sha256": "../../etc/passwd", "path": None, "original_size": [1, 1], "processed_size": [1, 1]}]},
        {"images": [{"sha256": "a" * 64, "path": None, "original_size": [0, 1], "processed_size": [1, 1]}]},
        {"completions": []},
        {"completions": [{"tokens": 3}]},
        {"images": 3},
    ],
)
def test_a_malformed_group_is_counted(tmp_path, broken):
    path = make_empty(tmp_path / "run")
    whole = group("a", "?", 1, [], [completion("1", {"exact": 1.0}, True)])
    write_lines(path / "rollouts" / "step-000001.jsonl", [whole, {**whole, **broken}])
    file = read_groups(read_run(path), "rollouts", 1)
    assert (len(file.groups), file.unreadable) == (1, 1)


def test_numbers_that_are_none_are_not_plotted(tmp_path):
    path = make_empty(tmp_path / "run")
    lines = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": true}', '{"step": 3, "loss": 0.5}', '{"loss": 1}', "[]"]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(path)
    assert run.series("loss") == [(3, 0.5)]
    assert run.unreadable == {"metrics.jsonl": 2}


def test_an_unknown_coordinate_space_is_none(tmp_path):
    path = make_empty(tmp_path / "run")
    record = group("a", "?", 1, [], [completion("1", {"exact": 1.0}, True)], space="furlongs")
    write_lines(path / "rollouts" / "step-000001.jsonl", [record])
    assert read_groups(read_run(path), "rollouts", 1).groups[0].coordinate_space is None


def test_the_generator_writes_what_training_writes(tmp_path):
    """Compare the keys of the made-up lines with those of GroupRecord."""
    path = make_grounding(tmp_path / "run", steps=2, rows=4)
    line = json.loads((path / "rollouts" / "step-000001.jsonl").read_text().partition("\n")[0])
    assert sorted(line) == sorted(
        ["answer", "completions", "coordinate_space", "id", "images", "index", "policy_version", "prompt", "question"]
    )
    assert sorted(line["completions"][0]) == sorted(
        ["advantage", "correct", "failures", "rewards", "seed", "text", "token_ids", "tokens", "total", "truncated"]
    )

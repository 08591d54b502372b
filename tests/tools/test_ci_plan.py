"""What .ci/run chooses for a commit."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import CORE_CASES, LONG_FILES, PASSED_OVER, is_left_to_lowest, is_of_third
from tests.forked import commands
from tools.ci_plan import (
    ALWAYS_WHOLE,
    BESIDE,
    CORE_ALONE,
    DIVIDED,
    FORCED,
    SECONDS_OF_THE_REST,
    STEPS,
    changed_paths,
    core_alone,
    plan_everything,
    plan_steps,
)

ROOT = Path(__file__).parents[2]
COMMIT = "00000004" + 32 * "a"  # 4 % 3 = 1


def test_a_change_of_nothing_that_matters_takes_a_third_of_each_suite():
    steps = plan_steps(COMMIT, ["README.md"])
    words = {step.target: step.arguments.removeprefix(step.target).split() for step in steps}
    assert tuple(words) == STEPS and {"WORKERS=1"} == {word for name in BESIDE for word in words[name][-1:]}
    parts = {name: [word for word in of if word != "WORKERS=1"] for name, of in words.items()}
    assert parts.pop("test") == ["LEFT_TO_LOWEST=1"]
    assert parts == {
        **{name: [] for name in ALWAYS_WHOLE if name != "test"},
        **{name: ["THIRD=core"] for name in CORE_ALONE},
        **{name: ["THIRD=1"] for name in DIVIDED},
    }


@pytest.mark.parametrize(
    ("path", "forced"),
    [
        ("tiercel/rollout/vllm/http.py", {"test-vllm"}),
        ("tiercel/distributed/ranks.py", {"test-scale"}),
        ("tiercel/models/layers/quantized.py", {"test-families", "test-generic", "test-quantized"}),
        ("tests/vllm/test_runs.py", {"test-vllm"}),
    ],
)
def test_a_changed_path_runs_its_suites_whole(path, forced):
    steps = plan_steps(COMMIT, ["README.md", path])
    assert {step.target for step in steps if step.target in DIVIDED and step.third is None} == forced
    assert all(path in step.why for step in steps if step.target in forced)


def test_what_a_large_change_cannot_run_whole_in_time_is_told():
    steps = {step.target: step for step in plan_steps(COMMIT, list(FORCED))}
    assert steps["test-families"].third is None and steps["test-scale"].third == 1
    assert "too long" in steps["test-scale"].why and "tests/distributed/" in steps["test-scale"].why
    assert set(SECONDS_OF_THE_REST) == set(DIVIDED)


def test_every_suite_is_whole_in_everything():
    steps = plan_everything()
    assert tuple(step.target for step in steps) == STEPS and all(step.third is None for step in steps)
    assert [step.target for step in steps if "WORKERS=1" in step.arguments] == [
        name for name in BESIDE if name not in CORE_ALONE
    ]


def test_every_path_of_the_table_is_there():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert [start for start in FORCED if not any(file.startswith(start) for file in files)] == []
    assert {suite for suites in FORCED.values() for suite in suites} <= set(DIVIDED)


def test_changes_are_those_since_the_base_and_without_one_of_the_last_hours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def commit(name: str, hour: int) -> str:
        (tmp_path / name).write_text(name)
        when = f"2026-01-01T{hour:02}:00:00+0000"
        given = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        for arguments in (("add", "."), (*who, "commit", "-qm", name)):
            subprocess.run(["git", *arguments], check=True, env=given)
        return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    subprocess.run(["git", "init", "-q"], check=True)
    first = commit("first", 1)
    assert changed_paths(first, None) == ["first"]
    commit("second", 9)
    third = commit("third", 11)
    assert changed_paths(third, None) == ["second", "third"]
    assert changed_paths(third, "HEAD~1") == ["third"]


def test_thirds_have_every_case_and_each_third_has_the_core():
    cases = [*CORE_CASES, *(f"tests/test_more.py::test_case[{number}]" for number in range(60))]
    thirds = [{case for case in cases if is_of_third(case, third)} for third in range(3)]
    assert set.union(*thirds) == set(cases) and set.intersection(*thirds) == set(CORE_CASES)
    assert all(len(third) > len(CORE_CASES) + 10 for third in thirds)
    assert {case for case in cases if is_of_third(case, "core")} == set(CORE_CASES)


@pytest.mark.parametrize(
    ("step", "late"),
    (
        ("test-scale THIRD=1", "test-scale THIRD=core"),
        ("test-families", "test-families THIRD=core"),
        ("test-real THIRD=1 WORKERS=1", "test-real THIRD=core WORKERS=1"),
        ("site", "site"),
        ("test LEFT_TO_LOWEST=2", "test LEFT_TO_LOWEST=2"),
    ),
)
def test_a_step_that_begins_late_runs_its_core_cases(step, late):
    assert core_alone(step) == late


def test_a_suite_that_takes_a_third_leaves_the_other_cases_out(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["-m", "vllm", "--collect-only", "--third", "0", "tests/vllm"]
    with (tmp_path / "said").open("wb") as out:
        command = commands().start(words, out, module="pytest")
    code, output = command.wait(120), (tmp_path / "said").read_text()
    assert code == 0, output
    taken = [line for line in output.splitlines() if "::" in line]
    assert taken and all(is_of_third(case, 0) for case in taken) and " deselected" in output


def test_each_case_of_make_test_runs_in_it_or_in_a_third_of_test_lowest():
    cases = [*CORE_CASES, *(f"tests/data/test_more.py::test_case[{number}]" for number in range(60))]
    kept = [f"tests/docs/test_more.py::test_case[{number}]" for number in range(60)]
    left = [{case for case in cases + kept if is_left_to_lowest(case, third)} for third in range(3)]
    assert set.union(*left) == set(cases) - set(CORE_CASES) and sum(map(len, left)) == 60
    assert all(is_of_third(case, third) for third in range(3) for case in left[third])
    passed_over = f"$(addprefix --ignore=tests/,{' '.join(PASSED_OVER)})"
    assert passed_over in (ROOT / "Makefile").read_text()


def test_every_long_file_is_there():
    assert [file for file in LONG_FILES if not (ROOT / file).is_file()] == []


def test_every_core_case_names_a_test():
    for case in CORE_CASES:
        path, _, name = case.partition("::")
        assert f"def {name.split('[')[0]}" in (ROOT / path).read_text(), case

"""What is drawn: the state of a run and its ranks, tokens, comparisons, and the reading of a run in progress."""

import fcntl
import json
import os
import subprocess
import sys
import time

from tests.web.report.fake_runs import cut_last_lines, make_grounding, make_sft
from tiercel.runs.files import write_atomically
from tiercel.runs.records import GroupRecord, GroupTokens, TokenRecord
from tiercel.web.report.reading import read_run
from tiercel.web.report.tokens import choices_of, records_of, tokens_of
from tiercel.web.view.compare import flat, shared_charts
from tiercel.web.view.live import LiveRun
from tiercel.web.view.ranks import rank_signs, ranks_part, state_of, status_part


def test_a_live_run_reads_what_the_report_reads(tmp_path):
    run = make_grounding(tmp_path / "run", steps=4, rows=4)
    live = LiveRun("run", run)
    assert live.read() == read_run(run)
    assert live.read() is live.read()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    assert live.read().last_step == 5  # the line that is being written is not read yet
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 2.0}\n')
    assert live.read().series("loss")[-2:] == [(5, 1.0), (6, 2.0)]
    write_atomically(run / "metrics.jsonl", "".join(lines[:3]))  # the run was resumed
    assert live.read().last_step == 2 and live.read() == read_run(run)


def test_lines_that_a_crash_cut_are_left_out(tmp_path):
    run = make_grounding(tmp_path / "run", steps=4, rows=4)
    cut_last_lines(run)
    assert LiveRun("run", run).read().last_step == 3


def test_symptoms_are_found_step_by_step_as_in_whole(tmp_path):
    run = make_sft(tmp_path / "run", steps=1)
    rows = [{"step": step, "grad_norm": 0.0, "reward/mean": 0.5} for step in range(1, 30)]
    live, found = LiveRun("run", run), []
    for row in rows:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        found = live.symptoms()
    assert found == LiveRun("again", run).symptoms() and len(found) == 1


def write_sign(run, rank: int, age: float = 0.0, **more) -> None:
    (run / "pulse").mkdir(exist_ok=True)
    file = run / "pulse" / f"rank-{rank}.json"
    sign = {"rank": rank, "phase": "rollout", "step": 3, "rows": [], "quiet_seconds": 4000.0, "limit_seconds": 600.0}
    file.write_text(json.dumps({**sign, **more}))
    os.utime(file, (time.time() - age, time.time() - age))


def test_ranks_are_shown_with_their_phase_and_time_since_progress(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    run = make_sft(tmp_path / "run", steps=3)
    write_sign(run, 1, waits_in="sum of loss", phase="learn", rows=["a", "b", "c", "d", "e"])
    write_sign(run, 0)
    (run / "pulse" / "rank-2.json").write_text('{"rank": 2, "pha')  # not in a form that a rank writes
    assert [sign.rank for sign in rank_signs(run)] == [0, 1]
    assert state_of(read_run(run)) == ("running", "rollout, learn")
    text = ranks_part(read_run(run))
    assert "sum of loss" in text and "a, b, c, d, …" in text and "silent" not in text
    assert "1 h 06 min" in text and "10 min 00 s" in text
    write_sign(run, 0, age=42)
    assert "silent for 42 s" in ranks_part(read_run(run)) and state_of(read_run(run))[0] == "running"
    write_sign(run, 1, age=60)
    (run / "pulse" / "rank-2.json").unlink()
    assert state_of(read_run(run))[0] == "killed" and "was killed" in ranks_part(read_run(run))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(read_run(run)) == ("silent", "no sign of a rank for 42 s")


def test_how_a_run_ended_is_told(tmp_path):
    run = make_sft(tmp_path / "run", steps=3)
    (run / "end.json").write_text('{"exit_code": 3, "reason": "loss is not finite"}')
    assert state_of(read_run(run)) == ("failed", "loss is not finite")
    assert "loss is not finite" in ranks_part(read_run(run))
    (run / "end.json").unlink()
    (run / "report.html").touch()
    assert "<b>done</b>" in status_part(read_run(run))  # all steps are there: made by an older version
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: null", "steps: 9"))
    assert state_of(read_run(run))[0] == "killed" and "was killed" in ranks_part(read_run(run))


def group_of(count: int, teacher: bool = False) -> GroupRecord:
    made = {"text": "ab", "tokens": 2, "token_ids": (1, 2), "seed": 0, "truncated": False, "rewards": {}}
    made |= {"failures": {}, "total": None, "correct": None, "advantage": None}
    made |= {"teacher": [["a", 0.3], ["b", None]]} if teacher else {}
    group = {"id": "r", "index": 4, "policy_version": 0, "prompt": "", "question": "", "answer": None, "images": []}
    return GroupRecord.from_json({**group, "completions": [made] * count})


def test_tokens_bear_the_strength_of_each_colour():
    record = TokenRecord(texts=("a", "<b>"), logprobs=(-3.0, None), entropies=(0.1, 0.5), gaps=None)
    group, tokens = group_of(1), GroupTokens(index=4, completions=(record,))
    assert choices_of(group, tokens) == ["plain", "logprob", "entropy"]
    first, second = tokens_of(group.completions[0], *records_of(group, tokens))
    assert (first.text, first.strengths) == ("a", {"logprob": "down3"})
    assert (second.text, second.strengths) == ("<b>", {"entropy": "up1"})


def test_tokens_of_a_teacher_are_shown_without_others():
    group = group_of(1, teacher=True)
    assert choices_of(group, None) == ["plain", "teacher"]
    told = tokens_of(group.completions[0], *records_of(group, None))
    assert [(each.text, each.strengths) for each in told] == [("a", {"teacher": "up1"}), ("b", {})]
    assert choices_of(group_of(1), None) == [] and tokens_of(group_of(1).completions[0], None) == []


def test_tokens_of_another_group_are_not_shown():
    record = TokenRecord(texts=("a",), logprobs=(-3.0,), entropies=None, gaps=None)
    assert records_of(group_of(2), GroupTokens(index=4, completions=(record,))) == [None, None]


def test_recipes_are_compared_by_their_leaves():
    recipe = {"optim": {"lr": 1e-5}, "rewards": [{"name": "iou"}, {"name": "format", "weight": 0.2}], "teacher": None}
    assert flat(recipe) == {
        "optim.lr": 1e-5,
        "rewards.0.name": "iou",
        "rewards.1.name": "format",
        "rewards.1.weight": 0.2,
        "teacher": None,
    }


def test_charts_of_the_same_number_become_one(tmp_path):
    first, second = make_sft(tmp_path / "a", steps=20), make_grounding(tmp_path / "b", steps=30, rows=4)
    charts = {chart.title: chart for chart in shared_charts([("a", read_run(first)), ("b", read_run(second))])}
    loss = charts["Loss"]
    assert [(each.label, each.colour) for each in loss.series] == [("a", 0), ("a, held out", 0), ("b", 1)]
    assert loss.last_step == 30
    assert [each.label for each in charts["Held-out accuracy"].series] == ["b, held out"]


def test_the_page_loads_no_torch():
    program = (
        "import sys, tiercel.web.view.serving; print(*sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""

from tests.web.report.fake_runs import make_empty, make_sft, write_lines
from tiercel.web.report import describe
from tiercel.web.report.reading import read_run
from tiercel.web.report.verdict import notices, unfinished


def grpo_rows(count: int, **more: float) -> list[dict]:
    """Rows of steps 1 to `count`: rewards 0.1 in the first half, 0.3 in the second; 10 completions a step."""
    return [
        {
            "step": step,
            "reward/mean": 0.1 if step <= count / 2 else 0.3,
            "tokens/completion": 50,
            "completion/tokens_mean": 5.0,
            **more,
        }
        for step in range(1, count + 1)
    ]


def evaluation(accuracy: float, low: float, high: float) -> dict:
    return {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high, "eval/count": 1024}


def run_with(tmp_path, rows: list[dict]):
    path = make_empty(tmp_path / "run")
    write_lines(path / "metrics.jsonl", rows)
    return path


def texts(path) -> str:
    run = read_run(path)
    return "\n".join(notice.text for notice in (*unfinished(run), *notices(run)))


def test_grpo_in_one_line(tmp_path):
    rows = [{"step": 0, **evaluation(0.27, 0.24, 0.30)}, *grpo_rows(400)]
    rows[-1] |= evaluation(0.41, 0.38, 0.44)
    assert describe(run_with(tmp_path, rows)) == (
        "GRPO, 400 steps: held-out accuracy 0.27 -> 0.41 (1,024 rows; 95 % intervals 0.24 to 0.30 and 0.38 to 0.44); "
        "sampled reward 0.10 (first 20 steps) -> 0.30 (last 20)"
    )


def test_a_run_under_way_says_so(tmp_path):
    path = run_with(tmp_path, [{"step": 0, **evaluation(0.27, 0.24, 0.30)}, *grpo_rows(60)])
    assert describe(path) == (
        "GRPO, 60 of 400 steps: held-out accuracy 0.27 (before training) (1,024 rows; 95 % interval 0.24 to 0.30); "
        "sampled reward 0.10 (first 20 steps) -> 0.30 (last 20)"
    )
    assert "The run is not at its end: 60 of 400 steps are done." in texts(path)


def test_a_run_that_has_just_started(tmp_path):
    assert describe(make_empty(tmp_path / "run")) == "GRPO, 0 of 400 steps: nothing recorded yet"


def test_sft_that_overfits(tmp_path):
    path = make_sft(tmp_path / "run")
    assert describe(path).startswith("SFT, 200 steps: held-out loss 2.50 -> 1.16 (512 rows); training loss 2.")
    assert "Held-out loss was lowest, 1.04, at step 150 and is 1.16 now" in texts(path)


def test_a_negative_held_out_loss_that_rose_is_told_and_one_that_stayed_is_not(tmp_path):
    stayed, rose = (
        texts(run_with(tmp_path / name, [{"step": 10, "eval/loss": -2.0}, {"step": 20, "eval/loss": last}]))
        for name, last in (("stayed", -1.99), ("rose", -1.5))
    )
    assert "Held-out loss was lowest" not in stayed
    assert "Held-out loss was lowest, \N{MINUS SIGN}2.00, at step 10 and is \N{MINUS SIGN}1.50 now" in rose


def test_masked_completions_are_shares_of_those_sampled(tmp_path):
    path = run_with(tmp_path, grpo_rows(400, **{"reward/masked": 1}))
    assert "400 of 4,000 sampled completions (10 %) were masked" in texts(path)
    few = run_with(tmp_path / "few", [*grpo_rows(399), {"step": 400, "reward/masked": 1}])
    assert "1 sampled completion had no usable reward" in texts(few)


def test_groups_without_variance(tmp_path):
    flat = run_with(tmp_path / "flat", grpo_rows(400, **{"group/zero_std_fraction": 1.0}))
    assert "In no group did the rewards differ" in texts(flat)
    rows = [*grpo_rows(380), *({"step": step, "group/zero_std_fraction": 0.9} for step in range(381, 401))]
    rows[0]["group/zero_std_fraction"] = 0.1
    assert "Over the last 20 steps 90 % of the groups had equal rewards" in texts(run_with(tmp_path, rows))


def test_truncation_entropy_and_rejected_rows(tmp_path):
    rows = grpo_rows(400, **{"completion/truncated_fraction": 0.75})
    for row in rows:
        row["entropy/mean"] = 1.0 if row["step"] <= 200 else 0.01
    path = run_with(tmp_path, rows)
    write_lines(path / "bad_rows.jsonl", [{"id": "a"}, {"id": "b"}])
    said = texts(path)
    assert "75 % of the completions were truncated at rollout.max_new_tokens = 64" in said
    assert "Entropy fell from 1.00 to 0.010" in said
    assert "2 rows of the data could not be used" in said


def test_turns_that_run_out(tmp_path):
    rows = grpo_rows(400, **{"completion/truncated_fraction": 0.75, "turns/mean": 3.5})
    path = run_with(tmp_path, rows)
    config = (path / "config.yaml").read_text().replace("max_new_tokens: 64", "max_turns: 6, max_trajectory_tokens: 99")
    (path / "config.yaml").write_text(config)
    said = texts(path)
    assert (
        "truncated: their turns or their tokens ran out (rollout.max_turns = 6, rollout.max_trajectory_tokens = 99)"
        in said
    )


def test_a_failed_environment_is_named_beside_rewards(tmp_path):
    path = run_with(tmp_path, grpo_rows(400, **{"reward/masked": 1, "environment/failed": 1}))
    assert "were masked: a reward or the environment failed" in texts(path)
    path = run_with(tmp_path / "b", grpo_rows(400, **{"reward/masked": 1, "environment/failed": 0}))
    assert "were masked: a reward failed" in texts(path)


def test_a_fall_of_accuracy_is_a_warning(tmp_path):
    rows = [{"step": 0, **evaluation(0.5, 0.47, 0.53)}, {"step": 400, **evaluation(0.4, 0.37, 0.43)}]
    assert "Held-out accuracy fell" in texts(run_with(tmp_path, rows))


def test_a_good_run_has_no_warnings(tmp_path):
    assert notices(read_run(run_with(tmp_path, grpo_rows(400)))) == []

"""A real run in which nothing can be learnt says so once, in its log and in its report."""

from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.web.report import write_report

LINE = "warning at step 5: Over the last 5 steps the gradient was exactly 0: nothing was learnt. "


def test_equal_rewards_are_named_in_log_and_report_and_not_again_after_a_resume(tiny_checkpoints, tmp_path, capfd):
    changes = {
        "data": {"eval": None, "workers": 1},
        "rewards": [{"name": "length", "max_tokens": 100}],
        "rollout": {"group_size": 2, "max_new_tokens": 4},
        "optim": {"prompts_per_step": 2},
    }
    rows = write_rows(tmp_path)
    for steps in (7, 12):
        train = {"steps": steps, "save_every": 3, "threads": 1}
        run = run_grpo(grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / "run", train=train, **changes))
    log = (run / "log.txt").read_text()
    assert log.count(LINE) == 1 and log.count(" warning at step ") == 3  # all of them are truncated, too
    assert "the rewards of every group are equal. Look at rollout.temperature." in log
    assert "warning at step 10: Over the last 10 steps 100 % of the groups had equal rewards" in log
    assert LINE in capfd.readouterr().err
    page = write_report(run).read_text()
    assert "Warnings on the way" in page
    assert page.count("the gradient was exactly 0: nothing was learnt.</td>") == 1


def test_a_run_of_sft_that_learns_has_no_warnings(tiny_checkpoints, tmp_path):
    recipe = sft_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        data={"eval": None, "workers": 0},
        train={"steps": 6, "threads": 1},
    )
    run = run_offline(recipe)
    assert "warning" not in (run / "log.txt").read_text()
    assert "Warnings on the way" not in write_report(run).read_text()

"""How long each phase may go without progress, and where ranks see each other before anything is imported."""

import subprocess
import sys

from tests.training.test_loops import grpo_recipe, sft_recipe
from tiercel.distributed.rank_status_files import NOTES
from tiercel.reliability.watchdog import ANY_PHASE
from tiercel.training.process_guard import phase_limits, process_guard

STALL = {"stall_timeout": 100.0, "reward_timeout": 7.0}


def limits(tmp_path, **rollout) -> dict[str, float]:
    rows = tmp_path / "rows.jsonl"
    return phase_limits(grpo_recipe(tmp_path, rows, tmp_path / "run", reliability=STALL, rollout=rollout))


def test_rewards_have_their_own_timeouts_on_top(tmp_path):
    assert limits(tmp_path)["reward"] == 107.0  # one reward of the user, one built-in


def test_rollouts_wait_for_servers_as_long_as_the_recipe_says(tmp_path):
    servers = {"engine": "vllm-server", "urls": ["http://127.0.0.1:1"], "patience": 50.0, "request_timeout": 20.0}
    assert limits(tmp_path, **servers)["rollout"] == limits(tmp_path, **servers)["lookahead"] == 170.0
    assert limits(tmp_path)["rollout"] == 100.0


def test_what_tells_of_no_progress_has_thrice_the_time(tmp_path):
    assert limits(tmp_path)["load"] == limits(tmp_path)["save"] == 300.0
    assert limits(tmp_path)["engine"] == 400.0
    assert limits(tmp_path, engine="vllm")["rollout"] == 300.0


def test_an_evaluation_may_take_what_rollouts_and_rewards_may(tmp_path):
    assert limits(tmp_path, engine="vllm")["evaluation"] == 300.0
    assert limits(tmp_path)["evaluation"] == 107.0


def test_sft_has_no_phases_of_rollouts(tmp_path):
    recipe = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", reliability=STALL)
    blind = dict.fromkeys(("import", "agree", "rows", "load", "engine", "save", "report"), 300.0)
    assert phase_limits(recipe) == {ANY_PHASE: 100.0, **blind, "download": 86400.0}


def test_the_watch_needs_no_torch():
    program = "import sys, tiercel.training.process_guard; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_ranks_see_each_other_in_the_notes_or_in_the_run_directory(tmp_path, monkeypatch):
    recipe = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", reliability=STALL)
    with process_guard(recipe, "sft") as heartbeat:
        assert heartbeat.activity.phase == "import"
    assert not (tmp_path / "run").exists()  # a single rank has nobody to tell
    monkeypatch.setenv("RANK", "1")
    with process_guard(recipe, "sft") as heartbeat:  # left over, so there is no rank 0 to wait for
        assert heartbeat.rank == 0 and not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with process_guard(recipe, "sft"):
        assert (tmp_path / "run/.signs-sft/rank-1.json").exists()
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    with process_guard(recipe, "sft"):
        assert (tmp_path / "notes/signs/rank-1.json").exists()

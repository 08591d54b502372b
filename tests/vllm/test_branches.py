"""Groups that fork, sampled by a real vLLM: completions share their first parts, and the trainer's logprobs agree."""

import json
from pathlib import Path

import pytest

from tests.vllm.servers import KEY
from tests.vllm.test_runs import by_server, finished, require_small_gaps
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
STEPS = 2
FORKS = {"group_size": 6, "branches": [2, 3], "branch_at": "e", "max_new_tokens": 40}


def require_forks(run: Path) -> None:
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert all(row["branches/reached_fraction"] > 0.3 for row in rows)
    assert all(row["tokens/drawn"] < row["tokens/completion"] for row in rows)
    records = [
        json.loads(line) for file in sorted((run / "rollouts").iterdir()) for line in file.read_text().splitlines()
    ]
    assert len(records) == STEPS * 4
    for record in records:
        starts = [each["token_ids"][: each["forks"][0]] for each in record["completions"]]
        assert starts[0] == starts[1] == starts[2] and starts[3] == starts[4] == starts[5]
        assert all(len(each["token_ids"]) <= FORKS["max_new_tokens"] for each in record["completions"])


def test_in_process(write_recipe):
    run = finished(write_recipe("qwen2_5_vl", rollout={"engine": "vllm", **FORKS}, train={"steps": STEPS}))
    require_forks(run)
    require_small_gaps(run, STEPS)


def test_by_server(fleet, write_recipe, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    server = fleet.started("qwen2_5_vl forks", write_recipe("qwen2_5_vl", rollout=FORKS)).wait()
    run = finished(write_recipe("qwen2_5_vl", rollout=by_server(server.url, **FORKS), train={"steps": STEPS}))
    require_forks(run)
    require_small_gaps(run, STEPS)
    assert server.end() is not None

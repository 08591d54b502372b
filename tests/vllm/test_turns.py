"""Trajectories that a real vLLM samples, about a hundred for each family: pictures are returned between the turns, and
the trainer's logprobs agree."""

import json
from pathlib import Path

import pytest

from tests.vllm.conftest import MODELS, MODELS_IN_BFLOAT16, MODELS_IN_PROCESS, SERVED, TURNS
from tests.vllm.test_runs import by_server, finished, require_small_gaps
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
STEPS = 2


def require_turns(run: Path) -> None:
    """Require that turns were sampled, with pictures between them, and that no observed token counts as sampled."""
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert all(row["turns/mean"] > 1 and row["environment/failed"] == 0 for row in rows)
    records = [
        json.loads(line) for file in sorted((run / "rollouts").iterdir()) for line in file.read_text().splitlines()
    ]
    completions = [completion for record in records for completion in record["completions"]]
    assert len(completions) == STEPS * 4 * TURNS["group_size"] > 100
    assert max(len(completion["turns"]) for completion in completions) == TURNS["max_turns"]
    assert sum(len(turn["images"]) for completion in completions for turn in completion["turns"]) > 10


@pytest.mark.parametrize("model", (*MODELS, *MODELS_IN_PROCESS))
def test_by_server(model, server_of, write_recipe, turns):
    server = server_of(model)
    run = finished(write_recipe(model, rollout=by_server(server.url, **turns), train={"steps": STEPS}))
    require_turns(run)
    require_small_gaps(run, STEPS)


def test_a_server_without_the_route_is_named(plain_server, write_recipe, turns):
    short = {**turns, "max_new_tokens": 16, "max_trajectory_tokens": 16}  # as many tokens as it was started for
    recipe = write_recipe(SERVED, rollout=by_server(plain_server.url, **short), train={"steps": STEPS})
    with pytest.raises(AssertionError, match="--enable-scale-out"):
        finished(recipe)


@pytest.mark.parametrize("model", (*MODELS, *MODELS_IN_PROCESS))
def test_in_process(write_recipe, turns, model):
    run = finished(write_recipe(model, rollout={"engine": "vllm", **turns}, train={"steps": STEPS}))
    require_turns(run)
    require_small_gaps(run, STEPS)


@pytest.mark.parametrize("model", MODELS_IN_BFLOAT16)
def test_in_process_in_bfloat16(write_recipe, turns, model):
    recipe = write_recipe(model, rollout={"engine": "vllm", **turns}, train={"steps": STEPS})
    run = finished(recipe, "model.dtype=bfloat16")
    require_turns(run)
    assert all(row["sampler/logprob_gap_mean"] < 0.03 for row in read_metrics(run) if "loss" in row)

"""Trajectories that a real vLLM samples, about a hundred for each family: pictures are returned between the turns, and
the trainer's logprobs agree."""

import json
from pathlib import Path

import pytest

from tests.vllm.conftest import MODELS, MODELS_IN_BFLOAT16, MODELS_IN_PROCESS
from tests.vllm.servers import KEY
from tests.vllm.test_runs import by_server, finished, require_small_gaps
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
STEPS = 2
TURNS = {"max_turns": 3, "max_new_tokens": 40, "max_trajectory_tokens": 260, "stop": ["e", "a"], "group_size": 13}
SHOW = '''
from PIL import Image


class Show:
    """Answers each turn with a picture whose size follows from what was written."""

    def reset(self, **row):
        return None

    def respond(self, completion: str):
        size = (56 + len(completion) % 40, 70)
        return [{"type": "text", "text": "Look."}, {"type": "image", "image": Image.new("RGB", size, (200, 30, 90))}]

    def get_reward(self) -> float:
        return 0.5
'''


@pytest.fixture
def environment(rows: Path, monkeypatch) -> dict:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    (rows.parent / "show.py").write_text(SHOW)
    return {"environment": f"{rows.parent}/show.py:Show", **TURNS}


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
def test_by_server(model, fleet, write_recipe, environment):
    server = fleet.started(f"{model} turns", write_recipe(model, rollout=environment)).wait()
    run = finished(write_recipe(model, rollout=by_server(server.url, **environment), train={"steps": STEPS}))
    require_turns(run)
    require_small_gaps(run, STEPS)
    assert server.end() is not None


def test_a_server_without_the_route_is_named(server_of, write_recipe, environment):
    server = server_of("qwen2_5_vl").wait()
    short = {**environment, "max_new_tokens": 16, "max_trajectory_tokens": 16}  # as many tokens as it was started for
    recipe = write_recipe("qwen2_5_vl", rollout=by_server(server.url, **short), train={"steps": STEPS})
    with pytest.raises(AssertionError, match="--enable-scale-out"):
        finished(recipe)


@pytest.mark.parametrize("model", (*MODELS, *MODELS_IN_PROCESS))
def test_in_process(write_recipe, environment, model):
    run = finished(write_recipe(model, rollout={"engine": "vllm", **environment}, train={"steps": STEPS}))
    require_turns(run)
    require_small_gaps(run, STEPS)


@pytest.mark.parametrize("model", MODELS_IN_BFLOAT16)
def test_in_process_in_bfloat16(write_recipe, environment, model):
    recipe = write_recipe(model, rollout={"engine": "vllm", **environment}, train={"steps": STEPS})
    run = finished(recipe, "model.dtype=bfloat16")
    require_turns(run)
    assert all(row["sampler/logprob_gap_mean"] < 0.03 for row in read_metrics(run) if "loss" in row)

"""Full fine-tuning whose completions a real vLLM samples: it gets all weights after every step.

`python -m tests.vllm.test_full FAULT grpo RECIPE` is a run with a fault in the names of the weights.
"""

import subprocess
import sys

import pytest

from tests.vllm.conftest import LONGEST_PROMPT, MODELS
from tests.vllm.servers import ENVIRONMENT, run_tiercel, start_tiercel
from tests.vllm.test_runs import (
    by_server,
    finished,
    output_of,
    require_small_gaps,
    require_whole,
    rows_done,
    wait_until,
)
from tiercel.cli.main import entry_point
from tiercel.rollout.vllm import colocated as vllm_process
from tiercel.rollout.vllm import full_weights as vllm_weights
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
IN_PROCESS = {"engine": "vllm"}
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
FAULTS = {
    "missing": "model.layers.0.self_attn.q_proj.bias is missing from the trainer's weights",
    "swapped": "its logprobs differ from the trainer's by up to",  # layers of one shape
    "kept": "the engine keeps the checkpoint's weights, or some of them",
}


def whole(write_recipe, model: str, rollout: dict, **changes):
    return write_recipe(model, rollout=rollout, lora=None, **changes)


@pytest.mark.parametrize("model", MODELS)  # the head of qwen2_vl is tied
def test_ten_steps_in_process(model, write_recipe):
    run = finished(whole(write_recipe, model, IN_PROCESS, freeze=[]))
    require_small_gaps(run, 10)
    require_whole(run, 10)
    assert [row["policy_version"] for row in read_metrics(run) if "loss" in row] == list(range(10))


@pytest.mark.parametrize("strategy", ("ddp", "fsdp2", "deepspeed"))  # ZeRO-3
def test_three_steps_of_two_ranks(strategy, write_recipe):
    recipe = whole(write_recipe, "qwen2_vl", IN_PROCESS, train={"steps": 3, "strategy": strategy})
    run = finished(recipe, "--nproc", 2)
    require_small_gaps(run, 3)
    require_whole(run, 3)


def test_a_run_that_goes_on_gives_the_engine_the_weights_of_its_checkpoint(write_recipe):
    recipe = whole(write_recipe, "qwen2_vl", IN_PROCESS)
    finished(recipe, "train.steps=2")
    run = finished(recipe, "train.steps=4")
    require_small_gaps(run, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_reach_the_engine_are_caught(fault, write_recipe):
    recipe = whole(write_recipe, "qwen2_vl", IN_PROCESS)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm.test_full", fault, "grpo", str(recipe)],
        env={**ENVIRONMENT, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert FAULTS[fault] in ended.stderr and "rollout.engine" in ended.stderr


@pytest.fixture(scope="module")
def open_server(fleet, write_recipe):
    """A server that takes whole weights."""
    recipe = write_recipe("qwen2_5_vl", lora=None, data={"max_prompt_tokens": LONGEST_PROMPT})
    return fleet.started("qwen2_5_vl whole", recipe, environment=DEV_MODE).wait()


def test_three_steps_by_server_and_a_server_that_is_killed_ends_the_run(open_server, write_recipe, tmp_path):
    rollout = by_server(open_server.url, patience=3)
    run = finished(whole(write_recipe, "qwen2_5_vl", rollout, freeze=[], train={"steps": 3}))
    require_small_gaps(run, 3)
    require_whole(run, 3)
    assert list((run / "policies").iterdir()) == []  # each version was removed
    recipe, log = whole(write_recipe, "qwen2_5_vl", rollout, train={"steps": 500}), tmp_path / "log"
    process = start_tiercel("grpo", recipe, output=log)
    wait_until(lambda: rows_done(output_of(recipe)) >= 2, process, log)
    open_server.kill()
    assert process.wait(60) == 3
    assert "got no answer within rollout.patience (3 s)" in log.read_text()


def test_a_server_that_takes_no_whole_weights_is_refused(server_of, write_recipe):
    server = server_of("qwen2_5_vl").wait()
    ended = run_tiercel("grpo", whole(write_recipe, "qwen2_5_vl", by_server(server.url)))
    assert ended.returncode == 2
    assert "has no /collective_rpc" in ended.stderr and "VLLM_SERVER_DEV_MODE=1" in ended.stderr


def test_serve_says_what_a_server_of_whole_weights_opens(write_recipe):
    ended = run_tiercel("serve", whole(write_recipe, "qwen2_5_vl", IN_PROCESS))
    assert ended.returncode == 2 and "VLLM_SERVER_DEV_MODE=1 is not set" in ended.stderr


def break_names(fault: str) -> None:
    """Make this process give the engine wrong names, too few, or nothing."""
    names_of = vllm_weights.saved_names

    def broken(family, model):
        names = names_of(family, model)
        if fault == "missing":
            del names["model.language_model.layers.0.self_attn.q_proj.bias"]
        elif fault == "swapped":
            for part in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
                one, other = (f"model.language_model.layers.{layer}.{part}" for layer in range(2))
                names[one], names[other] = names[other], names[one]
        return names

    vllm_weights.saved_names = broken
    if fault == "kept":
        vllm_process.reload = lambda engine, weights: None


if __name__ == "__main__":
    break_names(sys.argv.pop(1))
    entry_point()

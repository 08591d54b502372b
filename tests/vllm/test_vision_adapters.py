"""Adapters on vision tower and projector, which a real vLLM applies if it is asked to."""

import pytest

from tests.vllm.conftest import MODELS, MODELS_IN_BFLOAT16
from tests.vllm.servers import run_tiercel
from tests.vllm.test_runs import by_server, finished, require_small_gaps, require_whole
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
ALL = {"targets": "all"}
STEPS = {"steps": 5}


@pytest.mark.parametrize("model", (*MODELS, "qwen3_vl"))
def test_five_steps_in_process(model, write_recipe):
    run = finished(write_recipe(model, lora=ALL, rollout={"engine": "vllm"}, train=STEPS))
    require_small_gaps(run, 5)
    require_whole(run, 5)


@pytest.mark.parametrize("model", MODELS_IN_BFLOAT16)
def test_five_steps_in_process_in_bfloat16(model, write_recipe):
    recipe = write_recipe(model, lora=ALL, rollout={"engine": "vllm"}, train=STEPS)
    run = finished(recipe, "model.dtype=bfloat16")
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert all(row["sampler/logprob_gap_mean"] < 0.03 and row["grad_norm"] > 0 for row in rows)
    require_whole(run, 5)


def test_five_steps_of_an_adapter_on_chosen_layers_of_the_tower(write_recipe):
    chosen = {"targets": r".*visual\.blocks\.\d+\.attn\.(qkv|proj)"}
    run = finished(write_recipe("qwen2_5_vl", lora=chosen, rollout={"engine": "vllm"}, train=STEPS))
    require_small_gaps(run, 5)


def test_five_steps_by_a_server_that_serve_has_started(fleet, write_recipe):
    server = fleet.started("qwen2_5_vl vision", write_recipe("qwen2_5_vl", lora=ALL)).wait()
    run = finished(write_recipe("qwen2_5_vl", lora=ALL, rollout=by_server(server.url), train=STEPS))
    require_small_gaps(run, 5)
    require_whole(run, 5)


def test_a_server_without_the_flag_is_caught(server_of, write_recipe):
    server = server_of("qwen2_5_vl").wait()
    for targets in ("all", "vision", "projector"):
        recipe = write_recipe("qwen2_5_vl", lora={"targets": targets}, rollout=by_server(server.url))
        ended = run_tiercel("grpo", recipe)
        assert ended.returncode == 2, ended.stderr[-3000:]
        assert "--enable-tower-connector-lora" in ended.stderr, targets


@pytest.mark.parametrize("engine", ("vllm", "vllm-server"))
def test_a_family_whose_adapters_vllm_refuses_is_named(engine, write_recipe):
    rollout = {"engine": "vllm"} if engine == "vllm" else by_server("http://127.0.0.1:9")
    recipe = write_recipe("internvl", lora=ALL, rollout=rollout)
    ended = run_tiercel("grpo", recipe)
    assert ended.returncode == 2
    assert f"{engine} does not apply an adapter on vision layers of internvl" in ended.stderr
    assert "set lora.targets: language, or rollout.engine: local" in ended.stderr
    served = run_tiercel("serve", recipe, "--print")
    assert served.returncode == 2 and "on vision layers of internvl" in served.stderr

"""The gate, on real weights, with a real vLLM that computes on a CPU."""

import pytest
import yaml

from tests.vllm.servers import KEY, Server, run_tiercel
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_engine_and_trainer_agree_and_two_steps_are_made(model, rows, tmp_path, monkeypatch, dtype, most):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    recipe = tmp_path / "recipe.yaml"
    tree = {
        "model": {"path": str(model), "dtype": dtype},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "workers": 0, "max_prompt_tokens": 64},
        "rewards": [{"name": "exact"}],
        "rollout": {"group_size": 4, "max_new_tokens": 4, "engine": "vllm-server", "urls": ["http://127.0.0.1:1"]},
        "optim": {"lr": 1e-3, "prompts_per_step": 4},
        "train": {"steps": 2, "threads": 1},
        "output": str(tmp_path / "run"),
    }
    recipe.write_text(yaml.safe_dump(tree))
    server = Server(recipe=recipe, log=tmp_path / "log").start()
    try:
        server.wait()
        ended = run_tiercel("grpo", recipe, f"rollout.urls=[{server.url}]")
    finally:
        server.end()
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "engine and trainer agree" in ended.stderr
    gaps = [row["sampler/logprob_gap_mean"] for row in read_metrics(tmp_path / "run")[1:]]
    print(dtype, gaps)
    assert max(gaps) < most

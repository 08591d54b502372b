"""Whole runs whose completions a real vLLM samples: by server, in process, and tensor-parallel over two ranks."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.test_proved_models import text_rows
from tests.forked import Command
from tests.vllm.conftest import MODELS, MODELS_IN_BFLOAT16, MODELS_IN_PROCESS, TEXT_ONLY
from tests.vllm.servers import run_tiercel, start_tiercel
from tiercel.config import GrpoRecipe, load_recipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_rows
from tiercel.models.policy import load_for_inference
from tiercel.rollout.pending import load_pending
from tiercel.runs.directory import read_metrics
from tiercel.training.grpo.engine_logprob_check import trainer_logprobs
from tiercel.training.policy_passes import passes_for_inference

pytestmark = pytest.mark.vllm
GAP = 1e-3
MANY = 24  # completions of 4 prompts, whose tokens are more than vLLM takes at a time


def by_server(*urls: str, **more) -> dict:
    return {"engine": "vllm-server", "urls": list(urls), **more}


def output_of(recipe: Path) -> Path:
    return Path(yaml.safe_load(recipe.read_text())["output"])


def rows_done(run: Path) -> int:
    """Steps that metrics.jsonl has."""
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def wait_until(is_so: Callable[[], bool], process: Command, log: Path, seconds: float = 120) -> None:
    """Raise AssertionError if the run ends or the time is over before the condition holds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.01)


def finished(recipe: Path, *words: object) -> Path:
    """The directory of a run that ended with 0."""
    ended = run_tiercel("grpo", recipe, *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "engine and trainer agree" in ended.stderr
    return output_of(recipe)


def samples(run: Path) -> list[tuple[int, int, int]]:
    """(step, prompt's index, seed) of every completion in rollouts/."""
    found = []
    for file in sorted((run / "rollouts").iterdir()):
        step = int(file.stem.removeprefix("step-"))
        for group in map(json.loads, file.read_text().splitlines()):
            found += [(step, group["index"], each["seed"]) for each in group["completions"]]
    return found


def require_whole(run: Path, steps: int, prompts: int = 4, group_size: int = 4) -> None:
    """Each step has its prompts, each prompt consecutive seeds, nothing twice."""
    found = samples(run)
    assert len(found) == len(set(found)) == steps * prompts * group_size
    for step in range(1, steps + 1):
        seeds: dict[int, list[int]] = {}
        for _, prompt, seed in (each for each in found if each[0] == step):
            seeds.setdefault(prompt, []).append(seed)
        assert sorted(seeds) == list(range((step - 1) * prompts, step * prompts))
        assert all(sorted(own) == list(range(min(own), min(own) + group_size)) for own in seeds.values())


def require_small_gaps(run: Path, steps: int) -> None:
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["sampler/logprob_gap_max"] < GAP and row["sampler/staleness"] == 0 for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0


def require_videos(run: Path) -> None:
    """Some of the prompts had a video."""
    groups = [json.loads(line) for file in (run / "rollouts").iterdir() for line in file.read_text().splitlines()]
    assert any("-frame-" in image["path"] for group in groups for image in group["images"])


@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_with_videos_by_server(model, server_of, write_recipe, video_data):
    server = server_of(model).wait()
    run = finished(write_recipe(model, rollout=by_server(server.url, group_size=MANY), data=video_data))
    require_small_gaps(run, 10)
    require_whole(run, 10, group_size=MANY)
    require_videos(run)


def test_three_steps_with_videos_by_server_of_a_model_that_writes_their_times(fleet, write_recipe, video_data):
    server = fleet.started("qwen3_vl", write_recipe("qwen3_vl", data=video_data)).wait()
    recipe = write_recipe("qwen3_vl", rollout=by_server(server.url), data=video_data, train={"steps": 3})
    run = finished(recipe)
    require_small_gaps(run, 3)
    require_whole(run, 3)
    require_videos(run)


@pytest.mark.parametrize("model", (*MODELS, *MODELS_IN_PROCESS))
def test_ten_steps_in_process(model, write_recipe, video_data):
    data = {} if model == "internvl" else video_data
    run = finished(write_recipe(model, rollout={"engine": "vllm", "group_size": MANY}, data=data))
    require_small_gaps(run, 10)
    require_whole(run, 10, group_size=MANY)
    if data:
        require_videos(run)


@pytest.mark.parametrize("model", MODELS_IN_BFLOAT16)
def test_three_steps_in_process_in_bfloat16(model, write_recipe, video_data):
    recipe = write_recipe(model, rollout={"engine": "vllm"}, train={"steps": 3}, data=video_data)
    run = finished(recipe, "model.dtype=bfloat16")
    require_videos(run)
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert all(row["sampler/logprob_gap_mean"] < 0.03 and row["grad_norm"] > 0 for row in rows)
    require_whole(run, 3)


def test_three_steps_of_a_text_only_model_in_process(write_recipe, tmp_path):
    changes = {"data": {"train": str(text_rows(tmp_path))}, "train": {"steps": 3}}
    run = finished(write_recipe(TEXT_ONLY, rollout={"engine": "vllm"}, **changes))
    require_small_gaps(run, 3)
    require_whole(run, 3)


@pytest.mark.parametrize("engine", ("vllm", "vllm-server"))
def test_two_steps_of_two_ranks_with_an_engine_for_each_or_a_server_for_both(engine, server_of, write_recipe):
    rollout = {"engine": "vllm"} if engine == "vllm" else by_server(server_of("qwen2_vl").wait().url)
    run = finished(write_recipe("qwen2_vl", rollout=rollout, train={"steps": 2}), "--nproc", 2)
    require_small_gaps(run, 2)
    require_whole(run, 2)


def test_three_steps_tensor_parallel_over_two_ranks_after_a_run_that_was_killed(write_recipe):
    left = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # vLLM refuses a name that exists
    left.touch()
    recipe = write_recipe("qwen2_5_vl", rollout={"engine": "vllm", "vllm": {"tensor_parallel": 2}}, train={"steps": 3})
    run = finished(recipe, "--nproc", 2)
    require_small_gaps(run, 3)
    require_whole(run, 3)
    assert not list(left.parent.glob("*tp:*-cpushm_*"))


def test_two_steps_ahead_every_completion_is_of_the_version_that_is_recorded(server_of, write_recipe):
    """Checkpoints keep the next step's completions, two updates old: their logprobs are those of that policy."""
    server = server_of("qwen2_5_vl").wait()
    recipe = write_recipe(
        "qwen2_5_vl",
        rollout=by_server(server.url, lookahead=2, max_staleness=2, group_size=8),
        algorithm={"correction": {"level": "token"}},
        optim={"lr": 3e-2},
        train={"steps": 6, "save_every": 1, "keep": 10},
    )
    run = finished(recipe)
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert [row["sampler/staleness"] for row in rows] == [0, 1, 2, 2, 2, 2]
    require_whole(run, 6, group_size=8)
    for step in (3, 4):
        right, other = (gap_of_kept(run, load_recipe("grpo", recipe), step, by) for by in (step - 2, step - 1))
        print(f"step {step}: gap {right:.1e} by the recorded version, {other:.1e} by the next")
        assert right < GAP < other


def gap_of_kept(run: Path, recipe: GrpoRecipe, step: int, version: int) -> float:
    """The largest gap of the completions that the checkpoint of a step keeps, by the adapter of a version."""
    checkpoints = run / "checkpoints"
    policy = load_for_inference(recipe, torch.device("cpu"), checkpoints / f"step-{version:06d}" / "adapter")
    kept = load_pending(checkpoints / f"step-{step:06d}")
    assert {group.policy_version for group in kept.values()} == {step - 2} and len(kept) == 4
    encode = prompt_encoder(policy.family, recipe.data)
    by_id = {row.id: row for row in read_rows(str(recipe.data.train), recipe.data, "grpo").rows}
    learnt = map(json.loads, (run / "rollouts" / f"step-{step + 1:06d}.jsonl").read_text().splitlines())
    groups = [kept[line["index"]].with_prompt(encode(by_id[line["id"]], line["index"])) for line in learnt]
    found = trainer_logprobs(passes_for_inference(policy, recipe), groups)
    gaps = [
        (mine - torch.cat([completion.logprobs_L for completion in group.completions])).abs()
        for mine, group in zip(found, groups, strict=True)
    ]
    return float(torch.cat(gaps).nan_to_num(0.0).max())


def test_completions_sampled_ahead_are_kept_by_a_checkpoint_and_learnt_from_after_it(server_of, write_recipe, tmp_path):
    server = server_of("qwen2_5_vl").wait()
    recipe = write_recipe(
        "qwen2_5_vl",
        rollout=by_server(server.url, lookahead=1),
        algorithm={"correction": {"level": "token"}},
        optim={"lr": 1e-2},
        train={"steps": 8, "save_every": 100},
    )
    run = output_of(recipe)
    process = start_tiercel("grpo", recipe, output=tmp_path / "log")
    wait_until(lambda: rows_done(run) >= 3, process, tmp_path / "log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    (checkpoint,) = (run / "checkpoints").iterdir()
    kept = {index: group for index, group in load_pending(checkpoint).items()}
    step = int(checkpoint.name.removeprefix("step-"))
    assert len(kept) == 4 and {group.policy_version for group in kept.values()} == {step - 1}
    finished(recipe)
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert [row["sampler/staleness"] for row in rows] == [0] + [1] * 7
    assert all(0.5 < row["correction/weight_mean"] < 1.5 for row in rows)
    require_whole(run, 8)
    learnt = (run / "rollouts" / f"step-{step + 1:06d}.jsonl").read_text().splitlines()
    assert len(learnt) == 4
    for group in map(json.loads, learnt):
        ids = [completion.token_ids_L.tolist() for completion in kept[group["index"]].completions]
        assert [each["token_ids"] for each in group["completions"]] == ids

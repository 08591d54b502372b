"""Each thing is computed once: pictures in a step, prompts that no microbatch can hold, groups that teach nothing."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

from tests.tiny_models import noise_image
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.models.vision_cache import VisionStore
from tiercel.runs.directory import read_metrics

ADAPTER = Path("checkpoints/step-000003/adapter/adapter_model.safetensors")


class TowerCount:
    """Pictures that went through the tower, with and without a graph, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pictures: Counter[bool] = Counter()
        self.steps: list[Counter[bool]] = []
        forward, end_step = Tower.forward, VisionStore.end_step

        def counted(tower, hidden_states, grid_thw, **options):
            self.pictures[torch.is_grad_enabled()] += len(grid_thw)
            return forward(tower, hidden_states, grid_thw, **options)

        def ended(store):
            self.steps += [self.pictures] if self.pictures else []
            self.pictures = Counter()
            end_step(store)

        monkeypatch.setattr(Tower, "forward", counted)
        monkeypatch.setattr(VisionStore, "end_step", ended)


def distinct_pictures(run: Path, step: int) -> int:
    lines = (run / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()
    return len({image["sha256"] for line in lines for image in json.loads(line)["images"]})


CASES = {
    "plain": {},
    "reference, minibatches, several microbatches": {
        "optim": {"minibatches": 2},
        "algorithm": {"kl": {"coef": 0.1}},
        "learner": {"max_tokens_per_microbatch": 60},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_tower_sees_each_distinct_picture_of_a_step_once_and_never_a_gradient(
    tiny_checkpoints, tmp_path, monkeypatch, case
):
    rows, data = write_rows(tmp_path), {"data": {"eval": None, "max_prompt_tokens": 54}}
    for number in (1, 4, 7, 10):  # every row with one image shows the same picture
        noise_image(56, 60, seed=99).save(tmp_path / f"{number}-0.png")
    count = TowerCount(monkeypatch)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / "run", **{**data, **CASES[case]})
    run = run_grpo(recipe)
    assert len(count.steps) == 3
    for step, seen in enumerate(count.steps, 1):
        assert seen[False] == distinct_pictures(run, step) > 0
        assert seen[True] == 0


def trains_the_tower(checkpoint: Path, rows: Path, output: Path, budget: int):
    return grpo_recipe(
        checkpoint,
        rows,
        output,
        data={"eval": None, "max_prompt_tokens": 39},
        lora={"targets": "all"},
        rollout={"group_size": 4},
        optim={"lr": 1e-3},
        learner={"max_tokens_per_microbatch": budget},
    )


def test_a_trained_tower_sees_each_picture_once_with_gradient(tiny_checkpoints, tmp_path, monkeypatch):
    rows, checkpoint = write_rows(tmp_path), tiny_checkpoints["qwen2_5_vl"]
    for number in (1, 4, 7, 10):
        noise_image(56, 60, seed=99).save(tmp_path / f"{number}-0.png")
    count = TowerCount(monkeypatch)
    small = run_grpo(trains_the_tower(checkpoint, rows, tmp_path / "small", 45))
    for step, seen in enumerate(count.steps, 1):
        # once to sample, and once with gradient however many microbatches show it
        assert seen[False] == seen[True] == distinct_pictures(small, step)
    large = run_grpo(trains_the_tower(checkpoint, rows, tmp_path / "large", 4000))
    found, expected = load_file(small / ADAPTER), load_file(large / ADAPTER)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_groups_without_advantage_are_skipped_and_nothing_changes(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def variety(sample):\n    return len(set(sample.completion)) / 10 if int(sample.id[4:]) % 3 else 1.0\n"
    )
    runs = {}
    for skips in (True, False):
        changes = {"learner": {"skip_zero_advantage": skips}, "data": {"eval": None}}
        runs[skips] = run_grpo(grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / f"run-{skips}", **changes))
    metrics = {skips: read_metrics(run) for skips, run in runs.items()}
    assert sum(row["group/skipped"] for row in metrics[True]) > 0
    assert sum(row["group/skipped"] for row in metrics[False]) == 0
    for skipping, computing in zip(metrics[True], metrics[False], strict=True):
        assert skipping["loss"] == pytest.approx(computing["loss"], abs=1e-6)
        assert skipping["grad_norm"] == pytest.approx(computing["grad_norm"], rel=1e-4)
    found, expected = (load_file(runs[skips] / ADAPTER) for skips in (True, False))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_when_every_group_is_skipped_the_optimiser_still_steps(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(
        "calls = []\n\ndef variety(sample):\n    calls.append(1)\n"
        "    return len(set(sample.completion)) / 10 if len(calls) <= 12 else 1.0\n"
    )
    runs = {}
    for skips in (True, False):
        changes = {"learner": {"skip_zero_advantage": skips}, "data": {"eval": None}}
        runs[skips] = run_grpo(grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / f"run-{skips}", **changes))
    last = read_metrics(runs[True])[-1]
    assert last["group/skipped"] == 4 and last["grad_norm"] == 0 and "entropy/mean" not in last
    found, expected = (load_file(runs[skips] / ADAPTER) for skips in (True, False))
    for name, tensor in expected.items():  # momentum moves them further
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def changed_checkpoint(source: Path, directory: Path, changes: dict) -> Path:
    """A copy of a checkpoint whose decoder's config has `changes`."""
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("loop", ("grpo", "sft"))
def test_layers_with_windows_share_prompts_too(tiny_checkpoints, tmp_path, loop):
    changes = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    checkpoint = changed_checkpoint(tiny_checkpoints["qwen2_5_vl"], tmp_path / "model", changes)
    rows = write_rows(tmp_path)
    if loop == "grpo":
        run = run_grpo(grpo_recipe(checkpoint, rows, tmp_path / "run"))
        assert all(row["sampler/logprob_gap_mean"] < 1e-4 for row in read_metrics(run)[1:])
    else:
        run = run_offline(sft_recipe(checkpoint, rows, tmp_path / "run"))
    assert "cannot share" not in (run / "log.txt").read_text()


def test_dropout_of_a_models_own_config_is_off_and_told(tiny_checkpoints, tmp_path):
    plain, rows = tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path)
    dropping = changed_checkpoint(plain, tmp_path / "model", {"attention_dropout": 0.5})
    runs = [
        run_offline(sft_recipe(checkpoint, rows, tmp_path / f"run-{number}", lora=None, data={"eval": None}))
        for number, checkpoint in enumerate((plain, dropping))
    ]
    assert [row["loss"] for row in read_metrics(runs[0])] == [row["loss"] for row in read_metrics(runs[1])]
    assert ["attention_dropout 0.5" in (run / "log.txt").read_text() for run in runs] == [False, True]
    saved = json.loads((runs[1] / "checkpoints/step-000003/model/config.json").read_text())
    assert saved["text_config"]["attention_dropout"] == 0.5

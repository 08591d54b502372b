"""Whole runs of both loops on tiny checkpoints: every family, mixed rows, real loader workers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.tiny_models import FAMILY_NAMES, QWEN_FAMILIES, noise_image
from tiercel.config import GrpoRecipe, OfflineRecipe, SftRecipe
from tiercel.config.data import HeldOut
from tiercel.data.encoding import require_readable
from tiercel.data.order import RowOrder
from tiercel.data.reading import read_heldout_rows, read_training_rows
from tiercel.errors import DataError, EnvironmentProblem, RecipeError, RunError, TrainingError
from tiercel.rollout.local.engine import LocalSampler
from tiercel.runs.directory import open_run, read_metrics
from tiercel.training.grpo import loop as grpo
from tiercel.training.offline import loop as offline
from tiercel.training.trainer import build_trainer

REWARD = "def variety(sample):\n    return len(set(sample.completion)) / 10\n"
QUESTIONS = ("Where is the seven?", "<image>Where is the seven?", "<image><image>Where is the seven?")


def write_rows(directory: Path, count: int = 12) -> Path:
    """Rows with no, one and two images in turn."""
    lines = []
    for number in range(count):
        images = []
        for i in range(number % 3):
            images.append(f"{number}-{i}.png")
            noise_image(56 + 28 * i, 60, seed=number * 3 + i).save(directory / images[-1])
        messages = [
            {"role": "user", "content": QUESTIONS[number % 3]},
            {"role": "assistant", "content": f"[{number}, 20]"},
        ]
        row = {"id": f"row-{number}", "images": images, "messages": messages, "answer": "[1, 2]"}
        lines.append(json.dumps(row))
    (directory / "mine.py").write_text(REWARD)
    path = directory / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def grpo_recipe(checkpoint: Path, rows: Path, output: Path, **changes) -> GrpoRecipe:
    tree = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "eval": str(rows), "workers": 2, "max_prompt_tokens": 200},
        "rewards": [{"call": f"{rows.parent}/mine.py:variety"}, {"name": "exact"}],
        "rollout": {"group_size": 3, "max_new_tokens": 6},
        "learner": {"max_tokens_per_microbatch": 250},
        "optim": {"lr": 1e-2, "prompts_per_step": 4},
        "train": {"steps": 3, "save_every": 2, "threads": 1},
        "output": str(output),
    }
    return GrpoRecipe.model_validate(merged(tree, changes))


def sft_recipe(checkpoint: Path, rows: Path, output: Path, **changes) -> SftRecipe:
    tree = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "eval": str(rows), "workers": 2, "max_prompt_tokens": 200},
        "learner": {"max_tokens_per_microbatch": 250},
        "optim": {"lr": 1e-2, "prompts_per_step": 6},
        "train": {"steps": 3, "save_every": 2, "threads": 1},
        "output": str(output),
    }
    return SftRecipe.model_validate(merged(tree, changes))


def merged(tree: dict, changes: dict) -> dict:
    tree = dict(tree)
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
    return tree


def run_grpo(recipe: GrpoRecipe) -> Path:
    with open_run(recipe) as run:
        grpo.train(recipe, run)
    return run.path


def run_offline(recipe: OfflineRecipe) -> Path:
    with open_run(recipe) as run:
        offline.train(recipe, run)
    return run.path


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_three_grpo_steps_with_mixed_rows_and_workers(tiny_checkpoints, tmp_path, name):
    run = run_grpo(grpo_recipe(tiny_checkpoints[name], write_rows(tmp_path), tmp_path / "run"))
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "eval/reward/mean" in rows[0] and "eval/accuracy" in rows[0] and "eval/accuracy" in rows[3]
    for row in rows[1:]:
        assert row["grad_norm"] > 0
        assert row["sampler/logprob_gap_mean"] < 1e-4
        assert row["policy_version"] == row["step"] - 1
        assert 0 <= row["completion/truncated_fraction"] <= 1
    rollouts = [json.loads(line) for line in (run / "rollouts/step-000003.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4
    assert all(len(line["completions"]) == 3 for line in rollouts)
    for line in rollouts:
        for image in line["images"]:
            assert (run / "images" / f"{image['sha256']}.webp").is_file()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def test_gradients_take_no_memory_of_a_rollout(tiny_checkpoints, tmp_path, monkeypatch):
    sample, held = LocalSampler.sample, []

    def watched(self, *given, **options):
        held.append(any(each.grad is not None for each in self.policy.trained_parameters().values()))
        return sample(self, *given, **options)

    monkeypatch.setattr(LocalSampler, "sample", watched)
    changes = {"data": {"eval": None, "workers": 0}, "train": {"steps": 2}}
    run_grpo(grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **changes))
    assert held == [False] * 2


def test_held_out_rows_are_scored_and_never_trained_on(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    data, train = {"eval": {"fraction": 0.25}}, {"steps": 3, "eval_every": 1}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data=data, train=train)
    run = run_grpo(recipe)
    heldout = {row.id for row in read_heldout_rows(recipe.data, "grpo").rows}
    trained = ids_of(run, "rollouts")
    assert len(heldout) == 3 and len(trained) == 9 and not trained & heldout
    assert ids_of(run, "evaluations") == heldout
    assert [row["eval/count"] for row in read_metrics(run)] == [3, 3, 3, 3]
    other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval": HeldOut(count=3)})})
    with pytest.raises(RunError, match=r"a different recipe(.*\n)*.*data\.eval\.count: was None, is 3 now"):
        run_grpo(other)


def ids_of(run: Path, folder: str) -> set[str]:
    files = sorted((run / folder).iterdir())
    return {json.loads(line)["id"] for file in files for line in file.read_text().splitlines()}


def test_a_run_goes_on_with_the_split_it_had(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data={"eval": {"count": 3}})
    losses = [row["eval/loss"] for row in read_metrics(run_offline(recipe)) if "eval/loss" in row]
    assert len(losses) == 2
    (heldout, *_) = read_heldout_rows(recipe.data, "sft").rows
    rows.write_text(rows.read_text().replace(f'"{heldout.id}"', '"row-another"'))
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 4})})
    with pytest.raises(DataError, match=r"data\.train: .*different rows"):
        run_offline(longer)


def test_two_files_mixed_and_worded_by_the_recipe(tiny_checkpoints, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_rows(tmp_path / "other", count=6)
    data = {"mix": [{"path": str(other), "weight": 0.5}], "prompt": "is the {prompt}", "eval": None}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run", data=data)
    run = run_grpo(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 5})}))
    lines = [
        json.loads(line) for file in sorted((run / "rollouts").iterdir()) for line in file.read_text().splitlines()
    ]
    assert [line["index"] for line in lines] == list(range(20))
    assert all("is the " in line["prompt"] for line in lines)
    order = RowOrder(counts=(12, 6), weights=(1.0, 0.5), seed=0, shuffle=True)
    assert [line["id"] for line in lines] == [f"row-{order.row(index) % 12}" for index in range(20)]
    assert sum(order.row(index) >= 12 for index in range(18)) == 6


def write_video_rows(directory: Path) -> Path:
    """Write rows with a video of three frames, one of them with an image too."""
    rows = write_rows(directory)
    lines = []
    for number, line in enumerate(rows.read_text().splitlines()):
        row = json.loads(line)
        frames = [f"{number}-frame-{frame}.png" for frame in range(3)]
        for seed, frame in enumerate(frames):
            noise_image(84, 56, seed=100 + number * 3 + seed).save(directory / frame)
        row["messages"][0]["content"] = "<video>" + row["messages"][0]["content"]
        lines.append(json.dumps({**row, "videos": [frames]}))
    rows.write_text("\n".join(lines) + "\n")
    return rows


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_rows_with_videos_in_both_loops(tiny_checkpoints, tmp_path, name):
    data = {"video": {"min_pixels": 784, "max_pixels": 84 * 56}, "max_prompt_tokens": 250}
    more = {"data": data, "learner": {"max_tokens_per_microbatch": 400}}
    rows = write_video_rows(tmp_path)
    run = run_grpo(grpo_recipe(tiny_checkpoints[name], rows, tmp_path / "run", **more))
    metrics = read_metrics(run)
    assert all(row["grad_norm"] > 0 and row["sampler/logprob_gap_mean"] < 1e-4 for row in metrics[1:])
    first = json.loads((run / "rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert first["images"][0]["path"].endswith("-frame-0.png")
    trained = read_metrics(run_offline(sft_recipe(tiny_checkpoints[name], rows, tmp_path / "sft", **more)))
    assert trained[3]["eval/loss"] < trained[0]["eval/loss"]


def test_a_server_takes_no_videos_with_branches(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], write_video_rows(tmp_path), tmp_path / "run")
    table = read_training_rows(recipe.data, "grpo")
    for engine, branches in (("vllm", (2, 2)), ("vllm-server", ())):
        require_readable(with_rollout(recipe, engine=engine, branches=branches), table)
    with pytest.raises(RecipeError, match=r"rollout\.engine: vllm-server with turns or branches takes only images"):
        require_readable(with_rollout(recipe, engine="vllm-server", branches=(2, 2)), table)


def with_rollout(recipe: GrpoRecipe, **changes) -> GrpoRecipe:
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=changes)})


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_three_sft_steps_with_mixed_rows_and_workers(tiny_checkpoints, tmp_path, name):
    run = run_offline(sft_recipe(tiny_checkpoints[name], write_rows(tmp_path), tmp_path / "run"))
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["eval/loss"] < rows[0]["eval/loss"]
    assert all(row["grad_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize("workers", (0, 3))
def test_workers_change_nothing(tiny_checkpoints, tmp_path, workers):
    rows = write_rows(tmp_path)
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    one = run_grpo(grpo_recipe(checkpoint, rows, tmp_path / "one", data={"workers": 1}))
    other = run_grpo(grpo_recipe(checkpoint, rows, tmp_path / "other", data={"workers": workers}))
    file = Path("checkpoints/step-000003/adapter/adapter_model.safetensors")
    assert (one / file).read_bytes() == (other / file).read_bytes()


def test_several_minibatches_use_old_logprobs_and_kl_a_reference(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        optim={"minibatches": 2, "lr": 3e-2},
        algorithm={"kl": {"coef": 0.1}, "clip_low": 0.01, "clip_high": 0.01},
    )
    rows = read_metrics(run_grpo(recipe))
    assert rows[1]["kl/mean"] >= 0
    assert rows[3]["kl/mean"] > 0
    assert max(row["clip/low_fraction"] + row["clip/high_fraction"] for row in rows[1:]) > 0


def test_full_fine_tuning_trains_what_is_not_frozen(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        lora=None,
        freeze=["vision"],
        optim={"lr": 1e-3},
    )
    run = run_grpo(recipe)
    assert (run / "checkpoints/step-000003/model/model.safetensors").is_file()


def test_float16_scales_its_loss_and_bfloat16_trains(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    for dtype in ("float16", "bfloat16"):
        model = {"path": str(tiny_checkpoints["qwen2_5_vl"]), "dtype": dtype}
        run = run_offline(sft_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / dtype, model=model))
        last = read_metrics(run)[-1]
        assert last["eval/loss"] < read_metrics(run)[0]["eval/loss"]


def test_a_step_of_equal_rewards_in_float16_changes_nothing(tiny_checkpoints, tmp_path):
    """Nothing is computed, so the first update has no backward pass."""
    (tmp_path / "equal.py").write_text("def score(sample):\n    return 1.0\n")
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    own = {"model": {"path": str(checkpoint), "dtype": "float16"}, "rewards": [{"call": f"{tmp_path}/equal.py:score"}]}
    run = run_grpo(grpo_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", data={"eval": None}, **own))
    assert all(row["grad_norm"] == 0 and row["group/skipped"] > 0 for row in read_metrics(run))


def test_too_many_bad_rows_stop_the_run_and_are_recorded(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "1-0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\x00" * 50)
    recipe = grpo_recipe(tiny_checkpoints["ovis2"], rows, tmp_path / "run", data={"eval": None})
    with pytest.raises(DataError, match="max_bad_fraction"):
        run_grpo(recipe)
    bad = [json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in bad] == ["row-1"]
    assert bad[0]["field"] == "images"


def test_a_tolerated_bad_row_leaves_its_step_short(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "1-0.png").write_bytes(b"not an image")
    data = {"eval": None, "max_bad_fraction": 0.5}
    run = run_grpo(grpo_recipe(tiny_checkpoints["ovis2"], rows, tmp_path / "run", data=data))
    assert sum(row["rows/rejected"] for row in read_metrics(run)) == 1


def test_a_reward_that_always_fails_stops_the_run(tiny_checkpoints, tmp_path):
    (tmp_path / "bad.py").write_text("def score(sample):\n    raise ValueError('my own mistake')\n")
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        data={"eval": None},
        rewards=[{"call": f"{tmp_path}/bad.py:score"}],
    )
    with pytest.raises(TrainingError, match="my own mistake"):
        run_grpo(recipe)


def test_equal_rewards_change_nothing_and_are_counted(tiny_checkpoints, tmp_path):
    rewards = [{"name": "length", "max_tokens": 100}]
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", data={"eval": None}, rewards=rewards
    )
    rows = read_metrics(run_grpo(recipe))
    assert all(row["group/zero_std_fraction"] == 1 and row["grad_norm"] == 0 for row in rows)


def test_a_non_finite_loss_leaves_the_parameters_alone(tiny_checkpoints, tmp_path, monkeypatch):
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", data={"eval": None})
    seen = []
    honest = offline.example_update

    def poisoned(engine, objective, plan):
        before = {name: p.detach().clone() for name, p in engine.strategy.parameters.items()}
        next(iter(engine.strategy.parameters.values())).register_hook(lambda gradient: gradient * torch.nan)
        try:
            return honest(engine, objective, plan)
        finally:
            seen.append(all(torch.equal(before[name], p) for name, p in engine.strategy.parameters.items()))

    monkeypatch.setattr(offline, "example_update", poisoned)
    with pytest.raises(TrainingError, match="gradient norm is nan for rows row-"):
        run_offline(recipe)
    assert seen == [True]


def test_another_recipe_in_the_same_directory_is_refused(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data={"eval": None})
    run_offline(recipe)
    with pytest.raises(RunError, match=r"optim\.lr: was 0\.01, is 0\.02 now"):
        run_offline(
            sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data={"eval": None}, optim={"lr": 0.02})
        )


def test_an_engine_that_is_not_installed_is_refused_before_weights_are_read(tmp_path):
    recipe = grpo_recipe(tmp_path / "no checkpoint", write_rows(tmp_path), tmp_path / "run")
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": "vllm"})})
    with pytest.raises(EnvironmentProblem, match="needs the package vllm"):
        run_grpo(recipe)


def test_dropout_is_the_same_in_layers_that_the_backward_pass_computes_again(tiny_checkpoints, tmp_path):
    rows, weights = write_rows(tmp_path), []
    for number, checkpointing in enumerate((False, "full", "selective")):
        recipe = sft_recipe(
            tiny_checkpoints["qwen2_5_vl"],
            rows,
            tmp_path / str(number),
            lora={"dropout": 0.5},
            learner={"gradient_checkpointing": checkpointing},
            data={"eval": None},
        )
        (file,) = (run_offline(recipe) / "checkpoints/step-000003").rglob("adapter_model.safetensors")
        weights.append(load_file(file))
    plain, *again = weights
    for found in again:
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_dropout_is_on_in_updates_only_and_in_the_tower_too(tiny_checkpoints, tmp_path):
    lora = {"targets": "all", "dropout": 0.5}
    trainer = build_trainer(
        sft_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run", lora=lora)
    )
    drops = {
        name: each for name, each in trainer.policy.model.named_modules() if isinstance(each, nn.Dropout) and each.p
    }
    assert any("visual" in name for name in drops) and any("language_model" in name for name in drops)
    assert not any(each.training for each in drops.values())
    with trainer.training_mode():
        assert all(each.training for each in drops.values())
    assert not any(each.training for each in drops.values())

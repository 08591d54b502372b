"""Whole runs of what the catalogue offers, and what only a run can show: passes, masks, references, resumes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import move_adapter, tiny_prompts
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.algorithms import ADVANTAGES, KL_ESTIMATORS, LOSSES
from tiercel.config.conflicts.rules import rule_problems
from tiercel.distributed.ranks import ALONE
from tiercel.models.reference import FILE as REFERENCE_FILE
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import sampling_params
from tiercel.runs.directory import read_metrics
from tiercel.training.grpo.advantages import step_advantages
from tiercel.training.grpo.precomputed_values import kl_penalties
from tiercel.training.trainer import build_trainer
from tiercel.types import RewardValue, ScoredCompletion, ScoredGroup

pytestmark = pytest.mark.catalogue
ADAPTER = Path("checkpoints/step-000003/adapter/adapter_model.safetensors")
JUDGE = "def variety(sample):\n    return float('t' in sample.completion or 'n' in sample.completion)\n"


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path)


def short_run(checkpoints, rows: Path, name: str, **changes) -> list[dict]:
    """Return the metrics of three steps of four prompts, with two epochs of two minibatches each unless changed."""
    output = rows.parent / name.replace("/", "_")
    changes = {"optim": {"minibatches": 2, "rollout_epochs": 2}, "data": {"eval": None, "workers": 0}} | changes
    recipe = grpo_recipe(checkpoints["qwen2_5_vl"], rows, output, **changes)
    assert rule_problems(recipe) == []
    return read_metrics(run_grpo(recipe))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tiny_checkpoints, rows, loss):
    metrics = short_run(tiny_checkpoints, rows, loss, algorithm={"loss": loss})
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert all(0.9 < row["off_policy/ess"] <= 1.0001 for row in metrics)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_trains(tiny_checkpoints, rows, advantage):
    rewards = [{"call": f"{rows.parent}/mine.py:variety", "correct_at": 0.65}, {"name": "length", "max_tokens": 3}]
    algorithm = {"advantage": advantage, "pass_k": 2 if advantage == "pass_k" else None}
    metrics = short_run(tiny_checkpoints, rows, advantage, algorithm=algorithm, rewards=rewards)
    assert any(row["grad_norm"] > 0 for row in metrics)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("place", ("loss", "reward"))
def test_every_penalty_trains(tiny_checkpoints, rows, estimator, place):
    if (estimator, place) == ("k1", "loss"):
        pytest.skip("refused")
    kl = {"coef": 0.1, "estimator": estimator, "place": place}
    metrics = short_run(tiny_checkpoints, rows, f"{estimator}-{place}", algorithm={"kl": kl})
    # In the reward, the divergence is that at the step's start, when the first step's policy is still the reference.
    assert (metrics[0]["kl/mean"] == 0) == (place == "reward") and metrics[2]["kl/mean"] != 0


@pytest.mark.parametrize("lora", (None, {"rank": 4, "alpha": 8}), ids=("whole model", "whole tower"))
def test_a_penalty_on_what_is_trained_whole_goes_on_from_a_checkpoint(tiny_checkpoints, rows, lora):
    changes = {"lora": lora, "freeze": [], "algorithm": {"kl": {"coef": 0.1}}, "optim": {"lr": 1e-3}}
    metrics = short_run(tiny_checkpoints, rows, "once", **changes)
    assert metrics[0]["kl/mean"] < metrics[2]["kl/mean"]  # the first step compares the start with itself
    short_run(tiny_checkpoints, rows, "again", **changes)
    shutil.rmtree(rows.parent / "again/checkpoints/step-000003")
    (rows.parent / "again/metrics.jsonl").write_text("")
    resumed = short_run(tiny_checkpoints, rows, "again", **changes)
    assert resumed[-1]["kl/mean"] == metrics[-1]["kl/mean"] > 0
    (file,) = (rows.parent / "once/checkpoints/step-000003").rglob("*model.safetensors")
    assert file.read_bytes() == (rows.parent / "again" / file.relative_to(rows.parent / "once")).read_bytes()


def test_a_group_of_one_learns_from_the_step(tiny_checkpoints, rows):
    changes = {"rollout": {"group_size": 1}, "algorithm": {"advantage": "reinforce_pp"}}
    metrics = short_run(tiny_checkpoints, rows, "one", **changes)
    assert all(row["grad_norm"] > 0 and row["group/dropped"] == 0 for row in metrics)


@pytest.fixture(scope="module")
def sampled(tiny_checkpoints, tmp_path_factory):
    """An engine whose policy has left the reference, and three groups with rewards, one of them masked in part."""
    directory = tmp_path_factory.mktemp("sampled")
    rows = write_rows(directory)
    kl = {"coef": 0.5, "place": "reward", "estimator": "k1"}
    budget, small = {"max_tokens_per_microbatch": 45}, {"max_prompt_tokens": 39}  # this cuts groups
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"], rows, directory / "run", algorithm={"kl": kl}, learner=budget, data=small
    )
    trainer = build_trainer(recipe)
    move_adapter(trainer.policy, 0.1)
    prompts = tiny_prompts(trainer.policy.family)
    groups = LocalSampler(trainer.policy, trainer.vision).sample(prompts, sampling_params(recipe.rollout), [0, 10, 20])
    scored = [
        ScoredGroup(
            group=group,
            completions=tuple(
                ScoredCompletion(
                    completion=completion,
                    rewards={"mine": RewardValue(value=float(number))},
                    total=None if (group.prompt.index, number) == (1, 1) else float(number),
                    is_correct=None,
                )
                for number, completion in enumerate(group.completions)
            ),
        )
        for group in groups
    ]
    return trainer, recipe, scored


def plain_logprobs(trainer, prompt, completion) -> torch.Tensor:
    """By transformers alone, of one completion."""
    features = torch.cat(trainer.policy.vision_features(prompt.images)) if prompt.images else None
    ids = torch.cat([prompt.token_ids_P, completion.token_ids_L])
    embedded = trainer.policy.model.get_input_embeddings()(ids)
    family = trainer.policy.family
    if features is not None:
        embedded = embedded.masked_scatter(family.is_placeholder(ids)[:, None], features)
    start = int(prompt.positions_DP.max()) + 1
    after = start + torch.arange(len(completion.token_ids_L)).expand(len(prompt.positions_DP), -1)
    positions = torch.cat([prompt.positions_DP, after], 1)[:, None]
    hidden = family.language_model(trainer.policy.model)(inputs_embeds=embedded[None], position_ids=positions)
    logits = trainer.policy.model.get_output_embeddings()(hidden.last_hidden_state[0])
    logits[:, list(family.placeholder_ids)] = -torch.inf
    place = torch.arange(len(prompt.token_ids_P) - 1, len(ids) - 1)
    return logits.log_softmax(-1)[place, completion.token_ids_L]


def test_the_penalty_is_the_sum_over_each_completion_of_a_plain_forward(sampled):
    trainer, _, scored = sampled
    found = kl_penalties(trainer, scored)
    total = 0.0
    with torch.no_grad():
        for group in scored:
            prompt = group.group.prompt
            scorable = [each.completion for each in group.completions if each.total is not None]
            for number, completion in enumerate(scorable):
                own = plain_logprobs(trainer, prompt, completion)
                with trainer.policy.as_reference():
                    reference = plain_logprobs(trainer, prompt, completion)
                torch.testing.assert_close(found.old_logprobs[prompt.index][number], own, atol=2e-5, rtol=1e-4)
                expected = 0.5 * float((own - reference).sum())
                assert found.of_group[prompt.index][number] == pytest.approx(expected, abs=1e-4)
                total += expected / 0.5
    assert found.kl_sum == pytest.approx(total, abs=1e-3) and abs(total) > 1e-2
    assert found.tokens == sum(len(each) for group in found.old_logprobs.values() for each in group)


def test_the_penalty_is_taken_off_before_the_advantage(sampled):
    _, recipe, scored = sampled
    penalties = {group.group.prompt.index: (0.0, 5.0, 0.0)[: len(group.completions)] for group in scored}
    penalties[1] = (0.0, 5.0)  # for its two scorable completions, whose rewards are 0 and 2
    advantages = step_advantages(ALONE, scored, recipe, penalties=penalties)
    order = [sorted(range(3), key=lambda i: values[i]) for values in (advantages[0], advantages[2])]
    assert order == [[1, 0, 2], [1, 0, 2]]  # totals 0, -4, 2
    assert advantages[1][1] is None
    assert advantages[1][0] > 0 > advantages[1][2]  # totals 0, -3


def test_only_chosen_groups_have_advantages(sampled):
    _, recipe, scored = sampled
    advantages = step_advantages(ALONE, scored, recipe, among={0, 2})
    assert advantages[1] == [None, None, None] and None not in advantages[0] + advantages[2]


def test_truncated_completions_stay_in_the_baseline_and_out_of_the_loss(tiny_checkpoints, rows):
    stops = {"stop": ["a", "e", "i", "o"]}  # some end by chance, others do not
    short_run(tiny_checkpoints, rows, "masked", algorithm={"overlong": "mask"}, rollout=stops)
    lines = (rows.parent / "masked/rollouts/step-000001.jsonl").read_text().splitlines()
    completions = [completion for line in lines for completion in json.loads(line)["completions"]]
    assert {each["advantage"] is None for each in completions if each["truncated"]} == {True}
    kept = [each["advantage"] for each in completions if not each["truncated"]]
    assert kept and None not in kept


def test_only_the_tokens_of_highest_entropy_are_learnt_from(tiny_checkpoints, rows):
    whole = short_run(tiny_checkpoints, rows, "whole", optim={})
    part = short_run(tiny_checkpoints, rows, "part", optim={}, algorithm={"top_entropy": 0.25})
    assert 0.2 < part[0]["policy/learnt_fraction"] < 0.35
    assert 0 < part[0]["grad_norm"] != whole[0]["grad_norm"]
    cut = {
        "learner": {"max_tokens_per_microbatch": 50},
        "data": {"eval": None, "workers": 0, "max_prompt_tokens": 44},
    }
    small = short_run(tiny_checkpoints, rows, "small", optim={}, algorithm={"top_entropy": 0.25}, **cut)
    assert small[0]["grad_norm"] == pytest.approx(part[0]["grad_norm"], rel=1e-4)


def test_the_share_of_highest_entropy_may_be_of_all_tokens(tiny_checkpoints, rows):
    (rows.parent / "mine.py").write_text(
        "def variety(sample):\n    return len(set(sample.completion)) / 10 if int(sample.id[4:]) % 2 else 1.0\n"
    )
    learnt, every = (
        short_run(tiny_checkpoints, rows, name, optim={}, algorithm={"top_entropy": 0.25, "top_entropy_of": name})
        for name in ("learnt", "all")
    )
    assert all(row["policy/learnt_fraction"] == 0.25 for row in every)
    assert every[2]["grad_norm"] != learnt[2]["grad_norm"]


def test_the_entropy_bonus_raises_the_entropy(tiny_checkpoints, rows):
    (rows.parent / "mine.py").write_text("def variety(sample):\n    return 1.0\n")
    without = short_run(tiny_checkpoints, rows, "without", optim={})
    bonus = short_run(tiny_checkpoints, rows, "bonus", optim={}, algorithm={"entropy_coef": 0.5})
    assert without[0]["grad_norm"] == 0 < bonus[0]["grad_norm"]
    assert bonus[2]["entropy/mean"] > bonus[0]["entropy/mean"]


def test_further_rollouts_fill_a_step_with_groups_that_differ(tiny_checkpoints, rows):
    (rows.parent / "mine.py").write_text(
        "def variety(sample):\n    return len(set(sample.completion)) / 10 if int(sample.id[4:]) % 3 else 1.0\n"
    )
    metrics = short_run(tiny_checkpoints, rows, "filled", rollout={"resample_tries": 4})
    assert all(row["group/chosen"] == 4 for row in metrics)
    assert any(row["group/resample_tries"] > 0 for row in metrics)
    for step in (1, 2, 3):
        lines = (rows.parent / f"filled/rollouts/step-{step:06d}.jsonl").read_text().splitlines()
        groups = [json.loads(line) for line in lines]
        assert len(groups) == 4 * (1 + metrics[step - 1]["group/resample_tries"])
        learnt = [group for group in groups if group["completions"][0]["advantage"] is not None]
        assert len(learnt) == 4
        assert all(len({each["total"] for each in group["completions"]}) > 1 for group in learnt)
        assert [group["index"] for group in groups] == sorted({group["index"] for group in groups})


def test_without_any_group_that_differs_the_step_goes_on(tiny_checkpoints, rows):
    (rows.parent / "mine.py").write_text("def variety(sample):\n    return 1.0\n")
    rewards = [{"call": f"{rows.parent}/mine.py:variety"}]
    metrics = short_run(tiny_checkpoints, rows, "none", rollout={"resample_tries": 2}, rewards=rewards)
    assert all(row["group/resample_tries"] == 2 and row["group/chosen"] == 0 for row in metrics)
    assert all(row["grad_norm"] == 0 for row in metrics)


@pytest.mark.parametrize(
    "changes",
    (
        {"algorithm": {"kl": {"coef": 0.1, "sync_every": 2, "sync_mix": 0.5}}},
        {"rollout": {"resample_tries": 2}},
    ),
    ids=("a moving reference", "further rollouts"),
)
def test_a_resumed_run_ends_in_the_same_bytes(tiny_checkpoints, rows, changes):
    whole = short_run(tiny_checkpoints, rows, "whole", **changes)
    shutil.copytree(rows.parent / "whole", rows.parent / "cut")
    shutil.rmtree(rows.parent / "cut/checkpoints/step-000003")
    again = short_run(tiny_checkpoints, rows, "cut", **changes)
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors", REFERENCE_FILE):
        first, second = (rows.parent / run / "checkpoints/step-000003" / name for run in ("whole", "cut"))
        assert first.exists() == second.exists() == (name != REFERENCE_FILE or "algorithm" in changes)
        assert not first.exists() or first.read_bytes() == second.read_bytes()
    assert again[2]["loss"] == whole[2]["loss"]


def test_the_reference_follows_the_policy(tiny_checkpoints, rows):
    kl = {"coef": 0.1, "sync_every": 1}
    copied = short_run(tiny_checkpoints, rows, "copied", optim={}, algorithm={"kl": kl})
    still = short_run(tiny_checkpoints, rows, "still", optim={}, algorithm={"kl": {"coef": 0.1}})
    assert still[2]["kl/mean"] > 0
    assert all(row["kl/mean"] == pytest.approx(0, abs=1e-9) for row in copied)
    reference = load_file(rows.parent / "copied/checkpoints/step-000003" / REFERENCE_FILE)
    adapter = load_file(rows.parent / "copied" / ADAPTER)
    assert len(reference) == len(adapter) > 0
    of_name = {name.removeprefix("base_model.model."): tensor for name, tensor in adapter.items()}
    for name, tensor in reference.items():
        torch.testing.assert_close(of_name[name.replace(".default", "")], tensor, rtol=0, atol=0)

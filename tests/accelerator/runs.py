"""Whole runs on the pretended accelerator. test_accelerator.py runs these tests in their own process."""

from pathlib import Path

import pytest
import torch

from benchmarks.faults.fault_plan import Fault, planning
from tests.accelerator.device import WAITS, MixedDevices, WaitsForDevice, register
from tests.accelerator.waits import ALLOWED
from tests.rollout.test_local_turns import assert_equal, sampled
from tests.tiny_models import FAMILY_NAMES, TINY_LORA, tiny_recipe
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.config import GrpoRecipe
from tiercel.errors import NonFiniteError
from tiercel.models.layers.attention_span import FULL
from tiercel.models.policy import build_policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing import forward as learner
from tiercel.packing.attention.flex import FlexAttention
from tiercel.packing.attention.split_and_dense import DenseAttention
from tiercel.packing.tree import groups_tree
from tiercel.rollout.local.engine import LocalSampler
from tiercel.runs.directory import read_metrics
from tiercel.training import trainer as build
from tiercel.training.grpo import minibatch_updates
from tiercel.training.policy_passes import PolicyPasses

DEVICE, LIBRARY = register()
PLAIN = {"data": {"workers": 0, "eval": None, "max_prompt_tokens": 144}, "train": {"steps": 1}}
UPDATE = {
    "training.optimizer_step._Sums.read: read": 1,
    "distributed.strategies.replicated.Replicated.reduce_gradients: read": 1,
}
SEVERAL = {"optim": {"minibatches": 2, "prompts_per_step": 4}}
MIXED_ROWS = 4  # in each step: two without pictures, one with a picture, one with two


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(build, "training_device", lambda: DEVICE)
    monkeypatch.setitem(learner.ATTENTIONS, "flex", DenseAttention)  # FlexAttention refuses the device
    yield
    WAITS.raise_late()


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path)


@pytest.fixture
def waits_of_updates(monkeypatch) -> list[tuple[int, dict[str, int]]]:
    """The microbatches of each update, and its waits."""
    found, update = [], minibatch_updates.update_on_minibatch

    def counted(trainer, minibatch, *rest):
        with WAITS.counted() as places:
            made = update(trainer, minibatch, *rest)
        found.append((sum(len(unit.batches) for unit in minibatch.units), dict(places)))
        return made

    monkeypatch.setattr(minibatch_updates, "update_on_minibatch", counted)
    return found


@pytest.fixture
def rows_apart(monkeypatch):
    """Rows share nothing, so that a step of few small rows has several microbatches."""
    monkeypatch.setattr(PolicyPasses, "sharing_family", None)


def recipe_of(checkpoint: Path, rows: Path, output: str = "run", **changes) -> GrpoRecipe:
    learner_keys = {"form": "flex", "max_tokens_per_microbatch": 150, "skip_zero_advantage": False}
    return grpo_recipe(checkpoint, rows, rows.parent / output, **{"learner": learner_keys, **PLAIN, **changes})


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_step_of_grpo_on_the_device_is_that_of_the_cpu(tiny_checkpoints, rows, name, waits_of_updates, monkeypatch):
    """Sampling, vision tower, penalties, learner, loss, AdamW; the second run is on the CPU."""
    algorithm = {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}}
    run_grpo(recipe_of(tiny_checkpoints[name], rows, algorithm=algorithm))
    ((microbatches, waits),) = waits_of_updates
    assert microbatches > 1 and waits == UPDATE
    monkeypatch.undo()
    form = {"form": "auto", "max_tokens_per_microbatch": 150, "skip_zero_advantage": False}
    cpu = recipe_of(tiny_checkpoints[name], rows, algorithm=algorithm, learner=form, output="cpu")
    run_grpo(cpu)
    there, here = (read_metrics(rows.parent / place)[-1] for place in ("run", "cpu"))
    for key in ("loss", "grad_norm", "reward/mean", "kl/mean", "entropy/mean", "completion/tokens_mean"):
        assert there[key] == pytest.approx(here[key], rel=1e-3, abs=1e-5), key
    assert there["sampler/logprob_gap_max"] < 1e-4


def test_rows_that_share_their_beginning_wait_no_more_often(tiny_checkpoints, rows, waits_of_updates):
    run_grpo(recipe_of(tiny_checkpoints["qwen2_vl"], rows))
    ((microbatches, waits),) = waits_of_updates
    assert microbatches == 1 and waits == UPDATE


@pytest.mark.parametrize(
    "changes",
    (
        {"algorithm": {"correction": {"level": "sequence"}, "off_policy_delta": 0.1, "loss": "gspo"}},
        {"algorithm": {"kl": {"coef": 0.1}, "top_entropy": 0.5, "correction": {"level": "token"}}, **SEVERAL},
        {"algorithm": {"entropy_coef": 0.01, "loss": "sapo"}, "learner": {"form": "dense"}},
        {"learner": {"form": "repeated", "max_tokens_per_microbatch": 600}},
        {"lora": {"targets": "all", "rank": 4, "alpha": 8}, "learner": {"gradient_checkpointing": True}},
        {
            "lora": None,
            "rollout": {"group_size": 3, "max_new_tokens": 34, "min_new_tokens": 17},
            "learner": {"form": "flex", "max_tokens_per_microbatch": 180, "skip_zero_advantage": False},
        },
    ),
)
def test_no_recipe_makes_an_update_wait_more_often(tiny_checkpoints, rows, changes, waits_of_updates):
    run_grpo(recipe_of(tiny_checkpoints["qwen2_5_vl"], rows, **changes))
    assert waits_of_updates
    assert all(waits == UPDATE for _, waits in waits_of_updates)


def test_parts_that_share_a_pass_over_their_prompt_do_not_wait(tiny_checkpoints, rows, waits_of_updates):
    cut = {"form": "flex", "max_tokens_per_microbatch": 64, "skip_zero_advantage": False}
    data = {"workers": 0, "eval": None, "max_prompt_tokens": 56}
    run_grpo(recipe_of(tiny_checkpoints["qwen2_vl"], rows, learner=cut, data=data, rollout={"group_size": 10}))
    ((microbatches, waits),) = waits_of_updates
    assert microbatches > MIXED_ROWS and waits == UPDATE


@pytest.mark.parametrize("first_query", (0, 150))
def test_a_block_mask_is_made_without_a_wait(first_query):
    tree = groups_tree((150, 30, 120))
    mask = FlexAttention(tree, DEVICE, tree.after(first_query)).prepare(FULL)
    assert mask.kv_indices.device.type == mask.q_indices.device.type == DEVICE.type


def test_conversations_are_learnt_on_the_device(tiny_checkpoints, rows):
    keys = {"form": "flex", "max_tokens_per_microbatch": 150}
    with WAITS.counted() as places:
        run_offline(sft_recipe(tiny_checkpoints["qwen3_vl"], rows, rows.parent / "run", learner=keys, **PLAIN))
    assert {place: places[place] for place in UPDATE} == UPDATE


@pytest.mark.parametrize("name", ("qwen2_5_vl", "qwen3_5", "gemma3", "gemma4"))
def test_trajectories_on_the_device_are_those_of_the_cpu(tiny_checkpoints, name):
    """Answers with pictures come back to rows with and without windows and states."""
    groups = []
    for device in (DEVICE, torch.device("cpu")):
        policy = build_policy(tiny_recipe(tiny_checkpoints[name], lora=TINY_LORA), device)
        groups.append(sampled(policy, LocalSampler(policy, VisionStore(policy, 0))))
    assert_equal(*groups, atol=1e-4)


@pytest.mark.usefixtures("rows_apart")
def test_a_loss_that_is_not_finite_names_its_rows(tiny_checkpoints, rows):
    with planning([Fault(site="loss", kind="nan", step=0)]), pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe_of(tiny_checkpoints["qwen2_vl"], rows))
    assert 0 < len(caught.value.rows[0]) < MIXED_ROWS


def test_a_read_in_the_learner_is_refused(tiny_checkpoints, rows, monkeypatch):
    scores = learner.TokenHead.forward

    def reading(self, hidden_NH, *given, **named):
        if hidden_NH.device.type == DEVICE.type:  # the plan's own pass is on the CPU, with fake tensors
            assert hidden_NH.sum().item() != 0
        return scores(self, hidden_NH, *given, **named)

    monkeypatch.setattr(learner.TokenHead, "forward", reading)
    with pytest.raises(WaitsForDevice, match=r"PackedPolicy\._scores: read"):
        run_grpo(recipe_of(tiny_checkpoints["qwen2_vl"], rows))


@pytest.mark.parametrize(
    "wait",
    (
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: bool((tensor > 0).any()),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.to(torch.int64).bincount(),
        lambda tensor: torch.empty(2).to(tensor.device),
        lambda tensor: torch.tensor([1.0, 2.0], device=tensor.device),
        lambda tensor: tensor[torch.tensor([1, 0])],
    ),
)
def test_every_kind_of_wait_is_refused(wait):
    with pytest.raises(WaitsForDevice):
        wait(torch.ones(2, device=DEVICE))


class ReadingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def test_a_wait_in_a_backward_pass_is_refused_at_the_next_operation():
    tensor = torch.ones(2, device=DEVICE).requires_grad_()
    ReadingBackward.apply(tensor).sum().backward()
    with pytest.raises(WaitsForDevice, match="backward: read"):
        tensor.detach() + 1


def test_tensors_of_two_devices_do_not_meet():
    tensor = torch.ones(2, device=DEVICE)
    for call in (
        lambda: tensor + torch.ones(2),
        lambda: torch.ones(2, 2) @ tensor,
        lambda: torch.ones(2)[tensor.long()],
    ):
        with pytest.raises(MixedDevices):
            call()
    assert (tensor + torch.ones(2).to(DEVICE, non_blocking=True)).device.type == DEVICE.type
    assert (tensor * torch.tensor(2.0)).device.type == DEVICE.type  # a number on the host is passed along


def test_what_is_allowed_happens():
    """After all tests of this file."""
    assert set(ALLOWED) - WAITS.ever == set()

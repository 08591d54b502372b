"""Completions of steps: sampled when they are due, or one step ahead, and stored if a checkpoint needs them."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_models import tiny_prompts, tiny_recipe
from tests.training.test_loops import grpo_recipe
from tiercel.distributed.ranks import ALONE
from tiercel.models.families.loading import load_family
from tiercel.rollout.pending import PendingGroup, load_pending, save_pending
from tiercel.rollout.vllm.server import ServerSampler
from tiercel.training.grpo.rollouts import Rollouts
from tiercel.types import Completion, Group


class Counting(ServerSampler):
    """Answers at once, and remembers the requests."""

    def __init__(self):
        self.asked: list[list[int]] = []
        self.policy = SimpleNamespace(version=0)

    def begin(self, prompts, params, seeds):
        if prompts:
            self.asked.append([prompt.index for prompt in prompts])
        future: Future = Future()
        future.set_result(tuple(group_of(prompt, seed, 0) for prompt, seed in zip(prompts, seeds, strict=True)))
        return future


def group_of(prompt, seed: int, version: int) -> Group:
    completion = Completion(
        token_ids_L=torch.tensor([1, 2]),
        logprobs_L=torch.tensor([float("nan"), -0.5]),
        text="ä [1]",
        is_truncated=True,
        seed=seed,
    )
    return Group(prompt=prompt, completions=(completion,), policy_version=version)


@pytest.fixture
def prompts(tiny_checkpoints):
    return tiny_prompts(load_family(tiny_recipe(tiny_checkpoints["qwen2_vl"]).model))


def rollouts(sampler, tmp_path, lookahead, restored=None) -> Rollouts:
    recipe = grpo_recipe(
        tmp_path,
        tmp_path / "rows.jsonl",
        tmp_path,
        rollout={
            "engine": "vllm-server",
            "urls": ["http://127.0.0.1:8000"],
            "lookahead": lookahead,
            "max_staleness": 2,
        },
        algorithm={"correction": {"level": "token"}},
    )
    return Rollouts(recipe, ALONE, SimpleNamespace(sampler=sampler), None, restored=restored)


def test_without_lookahead_a_steps_prompts_are_asked_for_when_it_is_their_turn(prompts, tmp_path):
    sampler = Counting()
    source = rollouts(sampler, tmp_path, 0)
    assert source.steps_ahead == 0
    for number, prompt in enumerate(prompts):
        (group,) = source.groups_for([prompt])
        source.begin_lookahead(())
        source.wait_for_lookahead()
        assert group.prompt is prompt and source.pending() == []
        assert sampler.asked[-1] == [number]
    assert sampler.asked == [[0], [1], [2]]


def test_with_lookahead_each_prompt_is_asked_for_once_one_step_ahead(prompts, tmp_path):
    sampler = Counting()
    source = rollouts(sampler, tmp_path, 1)
    assert source.steps_ahead == 1
    for number, prompt in enumerate(prompts):
        (group,) = source.groups_for([prompt])
        source.begin_lookahead([prompts[number + 1 : number + 2]])
        assert len(sampler.asked) == min(3, number + 2)
        source.wait_for_lookahead()
        assert group.prompt is prompt
        assert [kept.index for kept in source.pending()] == ([number + 1] if number < 2 else [])
    assert sampler.asked == [[0], [1], [2]]


def test_two_steps_ahead_only_the_next_step_is_waited_for(prompts, tmp_path):
    sampler = Counting()
    source = rollouts(sampler, tmp_path, 2)
    source.groups_for(prompts[:1])
    source.begin_lookahead([prompts[1:2], prompts[2:]])
    assert sampler.asked == [[0], [1], [2]]
    source.wait_for_lookahead()
    assert [kept.index for kept in source.pending()] == [1]
    assert [group.prompt.index for group in source.groups_for(prompts[1:2])] == [1]
    source.begin_lookahead([])
    source.wait_for_lookahead()
    assert [group.prompt.index for group in source.groups_for(prompts[2:])] == [2] and source.pending() == []
    assert sampler.asked == [[0], [1], [2]]


def test_a_checkpoints_groups_are_taken_and_not_sampled_again(prompts, tmp_path):
    kept = [PendingGroup.of(group_of(prompts[0], 7, 4)), PendingGroup.of(group_of(prompts[2], 9, 4))]
    save_pending(tmp_path, kept)
    sampler = Counting()
    source = rollouts(sampler, tmp_path, 1, load_pending(tmp_path))
    groups = source.groups_for(prompts)
    assert sampler.asked == [[1]]
    assert [(group.prompt.index, group.policy_version) for group in groups] == [(0, 4), (1, 0), (2, 4)]
    completion = groups[0].completions[0]
    assert completion.token_ids_L.tolist() == [1, 2] and completion.text == "ä [1]"
    assert completion.logprobs_L[0].isnan() and completion.is_truncated and completion.seed == 7


def test_nothing_pending_writes_nothing(tmp_path):
    save_pending(tmp_path, [])
    assert list(tmp_path.iterdir()) == [] and load_pending(tmp_path) == {}

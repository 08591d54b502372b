"""Groups that fork: what their completions share, which seeds draw them, and what cannot go on."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.models.test_families import huggingface_inputs
from tests.rollout.scripted_dialogues import LIMITS, ScriptedDialogues, observation, with_pictures
from tests.rollout.test_local import PARAMS, likelier_end, scripted
from tests.tiny_models import FAMILY_NAMES, tiny_policy, tiny_prompts
from tiercel.config.schema import Rollout
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.branching import sample_branches
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.pending import PendingGroup, load_pending, save_pending
from tiercel.rollout.sampler import greedy_params
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.types import Completion, Group

SEEDS = [100, 200, 300]
AT = "e"
FORKED = replace(PARAMS, branches=(2, 3), branch_at=AT, group_size=6, max_new_tokens=40, temperature=1.3)


@pytest.fixture(scope="module")
def policies(tiny_checkpoints) -> dict[str, Policy]:
    return {name: tiny_policy(tiny_checkpoints[name], noise=0.1) for name in FAMILY_NAMES}


@pytest.fixture
def policy(policies) -> Policy:
    return policies["qwen2_5_vl"]


def sampled(policy: Policy, params=FORKED, dialogues=None, places=(0, 1, 2), first: int = 0) -> tuple[Group, ...]:
    prompts = tiny_prompts(policy.family)
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    with likelier_end(policy, 3.5):
        chosen = [prompts[place] for place in places], params, [SEEDS[place] + first for place in places]
        return sample_branches(sampler, *chosen, dialogues)


def flat(groups: tuple[Group, ...]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def facts(completion: Completion) -> tuple:
    trajectory = completion.trajectory
    return (
        completion.token_ids_L.tolist(),
        completion.text,
        completion.is_truncated,
        completion.seed,
        completion.forks,
        None if trajectory is None else (trajectory.turns, trajectory.is_sampled_L.tolist(), trajectory.outcome),
    )


def test_continuations_share_a_first_part_that_ends_with_the_string(policy):
    tokenizer = policy.family.tokenizer
    parts = set()
    for group, (start, stop) in product(sampled(policy), ((0, 3), (3, 6))):
        family = group.completions[start:stop]
        assert len(group.completions) == 6 and len({each.forks for each in family}) == 1
        ((fork,),) = {each.forks for each in family}
        starts = [each.token_ids_L[:fork].tolist() for each in family]
        assert starts[0] == starts[1] == starts[2]
        for each in family:
            assert torch.equal(each.logprobs_L[:fork], family[0].logprobs_L[:fork])
            assert each.trajectory is None and len(each.token_ids_L) <= 40
        if fork < len(family[0].token_ids_L):
            assert AT in tokenizer.decode(starts[0][-1:]) and AT not in tokenizer.decode(starts[0][:-1])
            assert len({tuple(each.token_ids_L.tolist()) for each in family}) > 1
        parts.add(tuple(starts[0]))
    assert len(parts) == 6


def test_parts_are_what_the_engine_draws_from_what_is_there_with_these_seeds(policy):
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    for group, seed in zip(sampled(policy), SEEDS, strict=True):
        plain = replace(PARAMS, temperature=1.3, max_new_tokens=40)
        for part in (0, 1):
            leaves = group.completions[3 * part : 3 * part + 3]
            with likelier_end(policy, 3.5):
                first = sampler.sample([group.prompt], replace(plain, group_size=1, stop=(AT,)), [seed + part])
            (drawn,) = first[0].completions
            (fork,) = leaves[0].forks
            assert drawn.token_ids_L.tolist() == leaves[0].token_ids_L[:fork].tolist()
            if fork == len(leaves[0].token_ids_L):
                assert [each.seed for each in leaves] == [seed + part] * 3
                continue
            ids_P = torch.cat([group.prompt.token_ids_P, drawn.token_ids_L])
            positions_DP = policy.family.positions(ids_P, [image.plan for image in group.prompt.images])
            longer = replace(group.prompt, token_ids_P=ids_P, positions_DP=positions_DP)
            own = sampling_seed(seed + part, 1)
            assert [each.seed for each in leaves] == [own, own + 1, own + 2]
            with likelier_end(policy, 3.5):
                rest = sampler.sample([longer], replace(plain, group_size=3, max_new_tokens=40 - fork), [own])
            for leaf, alone in zip(leaves, rest[0].completions, strict=True):
                assert leaf.token_ids_L[fork:].tolist() == alone.token_ids_L.tolist()
                torch.testing.assert_close(leaf.logprobs_L[fork:], alone.logprobs_L, rtol=0, atol=1e-5)
                assert leaf.is_truncated == alone.is_truncated


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logprobs_are_those_of_a_plain_forward_pass(policies, name, monkeypatch):
    policy = policies[name]
    family, encode, pictures = policy.family, policy.family.encode_image, {}

    def recorded(picture):
        image = encode(picture)
        pictures[image.sha256] = picture
        return image

    monkeypatch.setattr(family, "encode_image", recorded)
    params = replace(FORKED, branches=(2, 2, 2), group_size=8, temperature=1.0, max_new_tokens=24)
    for group in sampled(policy, params):
        for completion in group.completions:
            ids_T = torch.cat([group.prompt.token_ids_P, completion.token_ids_L])
            shown = [pictures[image.sha256] for image in group.prompt.images]
            with torch.no_grad():
                logits_TV = policy.model(**huggingface_inputs(family, group.prompt, ids_T, shown)).logits[0]
            logits_TV[:, list(family.checkpoint.end_token_ids)] += 3.5
            logits_TV[:, list(family.placeholder_ids)] = -torch.inf
            logprobs_LV = logits_TV[len(group.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
            expected_L = logprobs_LV.gather(1, completion.token_ids_L[:, None])[:, 0]
            torch.testing.assert_close(completion.logprobs_L, expected_L, rtol=0, atol=1e-4)


def test_neither_other_prompts_nor_other_first_parts_change_a_completion(policy):
    together = sampled(policy)
    for place in range(3):
        (alone,) = sampled(policy, places=(place,))
        assert [facts(each) for each in alone.completions] == [facts(each) for each in together[place].completions]
        (second,) = sampled(policy, FORKED.with_first_parts(1), places=(place,), first=1)
        assert [facts(each) for each in second.completions] == [facts(each) for each in together[place].completions[3:]]


def test_a_first_part_without_the_string_stands_for_all_of_its_continuations(policy):
    for group in sampled(policy, replace(FORKED, branch_at="never written")):
        for start in (0, 3):
            first, *others = group.completions[start : start + 3]
            assert first.forks == (len(first.token_ids_L),)
            assert [facts(each) for each in others] == [facts(first)] * 2


def test_a_stop_string_in_the_part_ends_the_completion(policy):
    tokenizer = policy.family.tokenizer
    for completion in flat(sampled(policy, replace(FORKED, stop=(AT,), branch_at="the"))):
        if "the" in completion.text:
            assert completion.forks == (len(completion.token_ids_L),) and not completion.is_truncated
        assert AT not in tokenizer.decode(completion.token_ids_L[:-1])


def test_the_least_number_of_tokens_counts_from_the_prompt(policy):
    ends = policy.family.checkpoint.end_token_ids
    end = policy.family.tokenizer.convert_ids_to_tokens(ends[0])
    prompts = tiny_prompts(policy.family)[:1]
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    params = replace(FORKED, branches=(1, 1), group_size=1, branch_at="the", temperature=1.0)
    for least, written in ((2, [" the", " is", end]), (4, [" the", " is", end, " is", end])):
        pieces = written if least == 2 else [" the", " is", " is", " is", end]
        with scripted(policy, pieces):
            (group,) = sample_branches(sampler, prompts, replace(params, min_new_tokens=least), [5])
        (completion,) = group.completions
        assert completion.forks == (1,) and len(completion.token_ids_L) == len(pieces)


def test_trajectories_fork_after_a_turn_and_its_answer(policy):
    dialogues = ScriptedDialogues(with_pictures(policy.family))
    params = replace(FORKED, branch_at=None, max_new_tokens=60)
    groups = sampled(policy, params, dialogues)
    assert dialogues.asked == [(0, (0, 1)), (1, (0, 1)), (2, (0, 1))]  # the others are copies
    turns = 0
    for group, start in product(groups, (0, 3)):
        family = group.completions[start : start + 3]
        ((fork,),) = {each.forks for each in family}
        for each in family:
            assert torch.equal(each.token_ids_L[:fork], family[0].token_ids_L[:fork])
            trajectory = each.trajectory
            whole_P = torch.cat([group.prompt.token_ids_P, each.token_ids_L])
            plans = [image.plan for image in (*group.prompt.images, *trajectory.images)]
            positions_DP = policy.family.positions(whole_P, plans)
            assert torch.equal(trajectory.positions_DL, positions_DP[:, len(group.prompt.token_ids_P) :])
            assert len(trajectory.turns) == len(trajectory.spans) <= LIMITS.max_turns
            assert trajectory.turns[0] == family[0].trajectory.turns[0]
            assert len(each.token_ids_L) <= LIMITS.max_tokens
            turns = max(turns, len(trajectory.turns))
            if fork < len(each.token_ids_L):
                assert not trajectory.is_sampled_L[fork - 1] and trajectory.is_sampled_L[fork]
                assert each.text == trajectory.turns[-1].text
    assert turns == LIMITS.max_turns


def test_a_trajectory_that_ends_with_its_first_turn_is_not_copied(policy):
    dialogues = ScriptedDialogues(lambda number, text: None)
    completions = flat(sampled(policy, replace(FORKED, branch_at=None), dialogues))
    assert all(each.forks == (len(each.token_ids_L),) for each in completions)
    assert [each.ended for each in dialogues.opened] == [1] * 6


def test_each_copy_goes_on_with_what_it_was_told(policy):
    dialogues = ScriptedDialogues(lambda number, text: observation(policy.family, " the") if number < 3 else None)
    params = replace(FORKED, branches=(1, 2), group_size=2, branch_at=None)
    (group,) = sampled(policy, params, dialogues, places=(0,))
    written = [[turn.text for turn in each.trajectory.turns] for each in group.completions]
    answered = [len(texts) - each.is_truncated for texts, each in zip(written, group.completions, strict=True)]
    assert [each.trajectory.outcome.value for each in group.completions] == answered
    assert written[0][0] == written[1][0] and written[0][1:] != written[1][1:]


def test_groups_that_fork_are_kept_for_a_checkpoint(policy, tmp_path):
    for number, params in enumerate((FORKED, replace(FORKED, branch_at="never written"))):
        groups = sampled(policy, params)
        (tmp_path / str(number)).mkdir()
        save_pending(tmp_path / str(number), [PendingGroup.of(group) for group in groups])
        kept = load_pending(tmp_path / str(number))
        for group in groups:
            assert list(map(facts, kept[group.prompt.index].completions)) == list(map(facts, group.completions))


def test_an_evaluation_does_not_fork(policy):
    assert greedy_params(Rollout(group_size=8, branches=(2, 4), branch_at="</think>")).branches == ()

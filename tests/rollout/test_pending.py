"""Groups that a checkpoint kept for the next step, when their files are not what was written."""

from dataclasses import replace

import pytest
import torch

from tests.trajectories import TURNS, trajectory_group
from tiercel.errors import ModelError, RunError
from tiercel.rollout.pending import GROUPS, TENSORS, PendingGroup, load_pending, save_pending
from tiercel.types import Completion, RewardValue


@pytest.fixture
def kept(tmp_path):
    """A directory with one group of one completion."""
    completion = Completion(
        token_ids_L=torch.arange(3), logprobs_L=torch.zeros(3), text="a", is_truncated=False, seed=5
    )
    save_pending(tmp_path, [PendingGroup(index=7, policy_version=1, completions=(completion,))])
    return tmp_path


def test_groups_come_back_by_their_index(kept):
    (group,) = load_pending(kept).values()
    assert (group.index, group.policy_version, group.completions[0].seed) == (7, 1, 5)
    assert load_pending(kept).keys() == {7}


@pytest.mark.parametrize("text", ["cos\nsystem\n", "[1]", '[{"index": 8}]', "{", "7"])
def test_other_descriptions_are_refused(kept, text):
    (kept / GROUPS).write_text(text)
    with pytest.raises(RunError, match=r"pending\.json does not contain the groups of a step"):
        load_pending(kept)


def test_other_tensors_are_refused(kept):
    (kept / TENSORS).write_bytes(b"\x80\x02" * 50)
    with pytest.raises(ModelError, match=r"pending\.safetensors cannot be read as a safetensors file"):
        load_pending(kept)


def test_half_of_a_surrogate_pair_is_a_question_mark(tmp_path):
    (completion,) = trajectory_group().completions
    odd = replace(completion, trajectory=replace(completion.trajectory, failure="unknown label \ud83d"))
    save_pending(tmp_path, [PendingGroup(index=3, policy_version=1, completions=(odd,))])
    assert load_pending(tmp_path)[3].completions[0].trajectory.failure == "unknown label ?"


def test_trajectories_come_back_with_their_pictures(tmp_path):
    def completions():
        return trajectory_group(outcome=RewardValue(value=0.5)).completions

    both = [PendingGroup(index=index, policy_version=1, completions=completions() + completions()) for index in (3, 4)]
    save_pending(tmp_path, both)
    (completion,) = completions()
    found = load_pending(tmp_path)[4].completions[1].trajectory
    assert completion.trajectory is not None and found is not None
    assert torch.equal(found.is_sampled_L, completion.trajectory.is_sampled_L)
    assert torch.equal(found.positions_DL, completion.trajectory.positions_DL)
    assert torch.equal(found.images[0].views[0], completion.trajectory.images[0].views[0])
    assert found.images[0].plan == completion.trajectory.images[0].plan
    assert (found.turns, found.outcome, found.failure) == (TURNS, RewardValue(value=0.5), None)

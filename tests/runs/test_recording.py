"""Trajectories as lines of a run directory."""

import json
from dataclasses import replace

import pytest

from tests.trajectories import picture, trajectory_group
from tiercel.distributed.ranks import ALONE
from tiercel.runs.recording import gathered_groups, group_record, images_of, pictured
from tiercel.runs.records import GroupRecord
from tiercel.types import RewardValue, ScoredCompletion, ScoredGroup


def scored() -> ScoredGroup:
    group = trajectory_group()
    rewards = {"right": RewardValue(value=1.0)}
    completion = ScoredCompletion(completion=group.completions[0], rewards=rewards, total=1.0, is_correct=True)
    return ScoredGroup(group=group, completions=(completion,))


def test_turns_their_calls_and_their_pictures_are_recorded_and_read_again():
    record = group_record(scored(), [0.5], "thousandths")
    (completion,) = record.completions
    first, last = completion.turns
    assert completion.tokens == 5 and completion.token_ids == tuple(range(9))
    assert (first.start, first.stop, last.start, last.stop) == (0, 2, 6, 9)
    assert first.answer == "<image>there" and first.images[0].sha256 == "b" * 64
    assert [call.failure for call in first.calls] == [None, "there is no tool peek"]
    assert last.answer is None and last.images == ()
    assert GroupRecord.from_json(json.loads(json.dumps(record.as_json()))) == record


def test_pictures_that_an_environment_adds_to_the_prompt_are_recorded():
    group = scored()
    prompt = replace(group.group.prompt, images=(picture(), picture()))
    assert len(prompt.row.visuals) < 2
    record = group_record(replace(group, group=replace(group.group, prompt=prompt)), [0.5], None)
    assert len(record.images) == 2 and record.images[1].path is None


def test_pictures_that_came_back_are_saved_and_do_not_travel():
    group = scored()
    assert images_of(group.group)[-1].sha256 == "b" * 64
    ((gathered, _),) = gathered_groups(ALONE, [group], [[0.5]])
    assert all(image.views == () for image in images_of(gathered.group))
    assert gathered.completions[0].completion is gathered.group.completions[0]


@pytest.mark.parametrize(
    ("most", "folder", "expected"),
    (
        (2, "rollouts", {1, 3}),
        (None, "rollouts", {1, 3, 4}),
        (0, "rollouts", set()),
        (2, "evaluations", {1, 3, 4}),
        (0, "evaluations", set()),
    ),
)
def test_the_first_prompts_with_pictures_keep_them(most, folder, expected):
    def group(index: int, images: int):
        prompt = replace(scored().group.prompt, index=index, images=(picture(),) * images)
        return replace(scored().group, prompt=prompt, completions=())

    groups = [group(0, 0), group(1, 1), group(2, 0), group(3, 2), group(4, 1)]
    assert pictured(groups, most, folder) == expected

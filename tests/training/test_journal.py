"""The groups of one step, kept next to a run until the next step."""

from dataclasses import replace

from tests.trajectories import trajectory_group
from tiercel.training.grpo.journal import FOLDER, journal_of, keep_in_journal
from tiercel.types import Group


def group_at(index: int) -> Group:
    group = trajectory_group()
    return replace(group, prompt=replace(group.prompt, index=index))


def test_a_steps_groups_of_all_ranks_come_back_until_the_next_step(tmp_path):
    assert journal_of(tmp_path, 0) == {}
    keep_in_journal(tmp_path, 0, 5, [group_at(40), group_at(41)])
    keep_in_journal(tmp_path, 1, 5, [group_at(42)])
    assert sorted(journal_of(tmp_path, 5)) == [40, 41, 42]
    assert journal_of(tmp_path, 4) == {}
    keep_in_journal(tmp_path, 0, 6, [group_at(50)])
    assert sorted(journal_of(tmp_path, 5)) == [42] and sorted(journal_of(tmp_path, 6)) == [50]


def test_what_ranks_left_that_are_gone_is_removed(tmp_path):
    for rank in (0, 1, 2):
        keep_in_journal(tmp_path, rank, 5, [group_at(40 + rank)])
    keep_in_journal(tmp_path, 0, 5, [group_at(40)], world_size=2)
    assert sorted(journal_of(tmp_path, 5)) == [40, 41]


def test_a_group_with_a_failed_trajectory_is_sampled_again(tmp_path):
    """The database that was away may be back."""
    (completion,) = group_at(41).completions
    failed = replace(completion, trajectory=replace(completion.trajectory, failure="no database"))
    keep_in_journal(tmp_path, 0, 5, [group_at(40), replace(group_at(41), completions=(completion, failed))])
    assert sorted(journal_of(tmp_path, 5)) == [40]


def test_a_group_comes_back_only_behind_the_prompt_that_it_followed(tmp_path):
    group = group_at(40)
    keep_in_journal(tmp_path, 0, 5, [group])
    kept = journal_of(tmp_path, 5)[40]
    assert kept.with_prompt(group.prompt) is not None
    assert kept.with_prompt(replace(group.prompt, token_ids_P=group.prompt.token_ids_P + 1)) is None
    (image, *others) = group.prompt.images or trajectory_group().completions[0].trajectory.images
    other = replace(image, sha256="other")
    assert kept.with_prompt(replace(group.prompt, images=(other, *others))) is None  # of the same size


def test_no_folder_of_an_earlier_step_stays(tmp_path):
    for step in (5, 6, 7):
        for rank in (0, 1):
            keep_in_journal(tmp_path, rank, step, [group_at(step)])
    assert [folder.name for folder in (tmp_path / FOLDER).iterdir()] == ["step-000007"]


def test_what_a_kill_left_unfinished_is_not_read(tmp_path):
    keep_in_journal(tmp_path, 0, 5, [group_at(40)])
    (tmp_path / FOLDER / "rank-0.tmp").mkdir()
    (tmp_path / FOLDER / "rank-0.tmp" / "pending.json").write_text("[")
    assert sorted(journal_of(tmp_path, 5)) == [40]
    keep_in_journal(tmp_path, 0, 5, [group_at(41)])
    assert sorted(journal_of(tmp_path, 5)) == [41]

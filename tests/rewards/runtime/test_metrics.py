import pytest

from tests.rewards.samples import scored, scored_group
from tiercel.errors import EXIT_TRAINING, TrainingError
from tiercel.reward_types import RewardValue
from tiercel.rewards.runtime.metrics import FailureStats, count_failures, reward_statistics


def value(number):
    return RewardValue(value=number)


FAILED = RewardValue(value=None, failure="reward mine.py:score: boom")
ABSENT = RewardValue(value=None)

# Three groups: one with totals 1 and 3 and a failure, one with equal totals, one with a single unmasked completion.
GROUPS = [
    scored_group(
        scored(1.0, True, iou=value(0.5), mine=value(0.5)),
        scored(3.0, False, iou=value(1.0), mine=value(2.0)),
        scored(None, False, iou=value(0.0), mine=FAILED),
    ),
    scored_group(scored(2.0, True, iou=value(0.5), mine=value(1.5)), scored(2.0, True, iou=value(1.0), mine=ABSENT)),
    scored_group(scored(2.0, None, iou=ABSENT, mine=value(2.0)), scored(None, None, iou=ABSENT, mine=ABSENT)),
]


def test_statistics_by_hand():
    assert reward_statistics(GROUPS) == pytest.approx(
        {
            "reward/mean": 2.0,
            "reward/std": 0.4**0.5,  # squares of -1, 1, 0, 0, 0 over 5
            "reward/iou/mean": 0.6,
            "reward/mine/mean": 1.5,
            "reward/failed_fraction": 1 / 7,
            "reward/masked": 2,
            "group/zero_std_fraction": 0.5,
            "group/dropped": 1,
        }
    )


def test_undefined_numbers_are_left_out():
    statistics = reward_statistics([scored_group(scored(None, None, mine=ABSENT), scored(None, None, mine=FAILED))])
    assert statistics == {"reward/failed_fraction": 0.5, "reward/masked": 2, "group/dropped": 1}
    assert reward_statistics([]) == {"reward/failed_fraction": 0.0, "reward/masked": 0, "group/dropped": 0}


def test_too_many_failures_stop_the_training_with_the_first_one():
    assert count_failures(GROUPS).fraction == pytest.approx(1 / 7)
    count_failures(GROUPS).require_at_most(1 / 7)
    count_failures([]).require_at_most(0.0)
    with pytest.raises(TrainingError, match=r"1 of 7 completions, .* = 0.1 allows(.|\n)*mine.py:score: boom") as caught:
        count_failures(GROUPS).require_at_most(0.1)
    assert caught.value.exit_code == EXIT_TRAINING


def test_failures_of_several_ranks_add_up():
    none = FailureStats(completions=3, failed=0, first_failure=None)
    total = none + count_failures(GROUPS)
    assert total == FailureStats(completions=10, failed=1, first_failure="reward mine.py:score: boom")
    assert total.fraction == 0.1

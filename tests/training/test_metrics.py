"""Numbers of a step with turns, by hand."""

from types import SimpleNamespace

import pytest

from tests.trajectories import trajectory_group
from tiercel.training.metrics import rollout_metrics
from tiercel.types import ScoredCompletion, ScoredGroup


def scored(**ending) -> ScoredGroup:
    group = trajectory_group(**ending)
    completion = ScoredCompletion(completion=group.completions[0], rewards={}, total=1.0, is_correct=None)
    return ScoredGroup(group=group, completions=(completion,))


def test_turns_calls_and_observed_tokens_are_counted_apart():
    recipe = SimpleNamespace(
        algorithm=SimpleNamespace(advantage="group_norm"), rewards=["exact"], learns_from_rewards=True
    )
    row = rollout_metrics(0, [scored(), scored(failure="it ended")], recipe)
    assert row["tokens/completion"] == 10 and row["completion/tokens_mean"] == 5
    assert row["tokens/observed"] == 8 and row["turns/mean"] == 2
    assert row["tools/zoom/calls"] == 2 and "tools/peek/calls" not in row
    assert row["tools/failed_fraction"] == pytest.approx(0.5) and row["environment/failed"] == 1

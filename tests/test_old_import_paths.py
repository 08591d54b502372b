"""Plug-in types of docs/api are found at their old places for one release, with a warning."""

from importlib import import_module, reload

import pytest


@pytest.mark.parametrize(
    ("old", "new", "name", "name_now"),
    [
        ("tiercel.rewards.entry", "tiercel.rewards.base", "Reward", "Reward"),
        ("tiercel.rewards.entry", "tiercel.rewards.base", "Entry", "RewardEntry"),
        ("tiercel.samples", "tiercel.reward_types", "Sample", "Sample"),
        ("tiercel.models.family", "tiercel.models.families.base", "Family", "Family"),
        ("tiercel.distributed.strategy", "tiercel.distributed.strategies.base", "Strategy", "Strategy"),
    ],
)
def test_old_places(old, new, name, name_now):
    with pytest.warns(DeprecationWarning):
        moved = reload(import_module(old))
    assert getattr(moved, name) is getattr(import_module(new), name_now)


def test_an_old_name():
    answers = import_module("tiercel.environments.answers")
    with pytest.warns(DeprecationWarning):
        assert answers.Answer is answers.EnvironmentAnswer

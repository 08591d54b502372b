"""Metrics of groups that fork, with numbers worked by hand."""

from dataclasses import replace

import pytest
import torch

from tests.packing.items import prompt
from tiercel.log import LineHandler, shown_by
from tiercel.training.grpo.branches import branch_metrics, has_forked, tell_of_unreached
from tiercel.types import Completion, Group, ScoredCompletion, ScoredGroup


def scored(*completions: tuple[list[int], int, float | None]) -> ScoredGroup:
    """Completions by their ids, the place of their fork, and their totals."""
    made = [
        Completion(
            token_ids_L=torch.tensor(ids),
            logprobs_L=torch.zeros(len(ids)),
            text="",
            is_truncated=False,
            seed=0,
            forks=(fork,),
        )
        for ids, fork, _ in completions
    ]
    judged = [
        ScoredCompletion(completion=each, rewards={}, total=total, is_correct=None)
        for each, (_, _, total) in zip(made, completions, strict=True)
    ]
    return ScoredGroup(
        group=Group(prompt=prompt([1]), completions=tuple(made), policy_version=0), completions=tuple(judged)
    )


FORKED = scored(([1, 2, 3], 2, 0.0), ([1, 2, 4, 5], 2, 2.0), ([7, 8], 2, 4.0), ([7, 8], 2, None))


def test_a_step_of_forks_in_numbers():
    # The second part has ended. Rewards 0, 2 | 4: mean 2, squares 4 + 0 + 4 = 8; between 2 x 1 + 1 x 4 = 6.
    assert branch_metrics([FORKED]) == {
        "branches/reached_fraction": 0.5,
        "tokens/drawn": 2 + 1 + 2 + 2,
        "branches/between_fraction": pytest.approx(6 / 8),
    }
    same = scored(([1, 2], 1, 1.0), ([1, 3], 1, 1.0))
    assert branch_metrics([same]) == {"branches/reached_fraction": 1.0, "tokens/drawn": 3}
    assert branch_metrics([]) == {}


def test_completions_that_do_not_fork_have_no_such_metrics():
    plain = [replace(each, completion=replace(each.completion, forks=())) for each in FORKED.completions]
    assert branch_metrics([replace(FORKED, completions=tuple(plain))]) == {}
    assert has_forked(plain[0].completion)


def test_what_did_not_fork_is_told():
    said: list[str] = []
    noted: list[str] = []
    with shown_by(LineHandler(said.append, noted.append)):
        tell_of_unreached([FORKED, FORKED], "</think>", 4)
        tell_of_unreached([scored(([1, 2], 1, 1.0))], "</think>", 4)
        assert len(noted) == 1 and "step 5: 4 of 8" in noted[0] and "</think>" in noted[0] and not said
        tell_of_unreached([scored(([1, 2], 2, 1.0))], None, 4)
    assert len(noted) == 1 and "1 of 1" in said[0] and "first turn" in said[0]

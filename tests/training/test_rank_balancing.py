"""Which items of a step stay together when ranks share the work."""

from types import SimpleNamespace

import pytest

from tests.packing.items import NINES
from tests.packing.test_sharing import item
from tiercel.packing import sharing
from tiercel.packing.batch import TokenCounter
from tiercel.training.rank_balancing import sharing_runs


def runs(budget: int, form: str = "split") -> list[tuple[list[int], int]]:
    """Four questions of picture a, then two of picture b: 3 tokens that are shared, and 2 for each question."""
    rows = [item([1, 9, 2, n], [n], pictures="a", index=n) for n in (3, 4, 5, 6)]
    rows += [item([1, 9, 2, n], [n], pictures="b", index=n) for n in (7, 8)]
    passes = SimpleNamespace(token_counter=lambda: TokenCounter(form, NINES), max_tokens=budget)
    found = sharing_runs(passes, rows, lambda row: (row,))
    return [([row.prompt.index for row in run.items], run.tokens) for run in found]


@pytest.fixture(autouse=True)
def short_pieces_are_shared(monkeypatch):
    monkeypatch.setattr(sharing, "SHORTEST", 3)


def test_questions_of_a_picture_stay_together():
    assert runs(11) == [([3, 4, 5, 6], 11), ([7, 8], 7)]


def test_no_more_stay_together_than_fit_into_a_microbatch():
    assert runs(10) == [([3, 4, 5], 9), ([6], 5), ([7, 8], 7)]


def test_parts_of_a_group_that_was_cut_for_ranks_without_any_stay_apart():
    parts = [item([1, 9, 2, 3], [answer], pictures="a", index=3) for answer in (4, 5)]
    passes = SimpleNamespace(token_counter=lambda: TokenCounter("split", NINES), max_tokens=100)
    assert [run.items for run in sharing_runs(passes, parts, lambda part: (part,))] == [[part] for part in parts]


def test_rows_that_share_nothing_are_apart():
    assert runs(100, "repeated") == [([number], 5) for number in (3, 4, 5, 6, 7, 8)]

"""Rows stored as columns, against the same rows in a dict."""

import random

import pytest

from tiercel.runs.records import finite
from tiercel.web.report.metrics import GrowingMetrics

VALUES = (0.5, -1.0, 3, 0, True, None, "text", [1], 1 << 60, 10**400, float("nan"), float("inf"), {"a": 1})


def made(dice: random.Random, steps: list[int]) -> list[dict]:
    keys = [f"key-{number}" for number in range(6)]
    return [{"step": step, **{key: dice.choice(VALUES) for key in dice.sample(keys, 3)}} for step in steps]


@pytest.mark.parametrize("seed", range(20))
def test_rows_come_back_as_they_were(seed):
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(100), 40)) if seed % 2 else [dice.randrange(30) for _ in range(40)]
    rows = made(dice, steps)
    growing = GrowingMetrics()
    for row in [*rows[:20], None, [1], {"loss": 1}, {"step": 1.5}, {"step": True}]:
        growing.add(row)
    before, known = growing.now(), list(growing.now())
    for row in rows[20:]:
        growing.add(row)
    expected = [row for _, row in sorted({row["step"]: row for row in rows}.items())]
    found = growing.now()
    assert repr(list(before)) == repr(known)  # what came later has not changed them
    assert repr([dict(sorted(row.items())) for row in found]) == repr([dict(sorted(row.items())) for row in expected])
    assert (len(found), found.unreadable) == (len(expected), 5)
    assert repr(list(found.since(7))) == repr(list(found)[7:]) and repr(found[-3:]) == repr(list(found)[-3:])
    assert repr(found[-1]) == repr(found.of_step(expected[-1]["step"]))
    for key in ("step", "key-0", "key-5", "nothing"):
        numbers = [(row["step"], finite(row.get(key))) for row in expected]
        assert found.series(key) == [(step, value) for step, value in numbers if value is not None]
        assert [row["step"] for row in found.having(key)] == [step for step, _ in found.series(key)]


def test_no_rows():
    found = GrowingMetrics().now()
    assert not found and list(found) == found.names() == found.series("loss") == []

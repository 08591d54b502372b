"""Numbers kept as columns, against the same rows in a dict."""

import random

import pytest

from tiercel.runs.records import finite
from tiercel.web.report.metrics import GrowingMetrics

VALUES = (0.5, -1.0, 3, 0, True, None, "text", [1], 1 << 60, 10**400, float("nan"), float("inf"), {"a": 1})


def made(dice: random.Random, steps: list[int]) -> list[dict]:
    keys = [f"key-{number}" for number in range(6)]
    return [{"step": step, **{key: dice.choice(VALUES) for key in dice.sample(keys, 3)}} for step in steps]


def numbers(row: dict) -> dict:
    return {key: number for key, value in row.items() if (number := finite(value)) is not None}


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_rows_come_back_as_they_were(seed):
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(3000), 1400)) if seed % 2 else [dice.randrange(30) for _ in range(40)]
    rows = made(dice, steps)
    growing = GrowingMetrics()
    for row in [*rows[:20], None, [1], {"loss": 1}, {"step": 1.5}, {"step": True}]:
        growing.add(row)
    before, known = growing.now(), list(growing.now())
    for row in rows[20:]:
        growing.add(row)
    expected = [numbers(row) for _, row in sorted({row["step"]: row for row in rows}.items())]
    found = growing.now()
    assert list(before) == known  # what came later has not changed them
    assert list(found) == expected and all(type(row["step"]) is int for row in found)
    assert (len(found), found.unreadable) == (len(expected), 5)
    assert list(found.since(7)) == list(found)[7:] and found.last_step == expected[-1]["step"]
    for key in ("key-0", "key-5", "nothing"):
        values = [(row["step"], row.get(key)) for row in expected]
        assert found.series(key) == [(step, value) for step, value in values if value is not None]
        assert [row["step"] for row in found.having(key)] == [step for step, _ in found.series(key)]


def test_no_rows():
    found = GrowingMetrics().now()
    assert not found and list(found) == found.names() == found.series("loss") == []
    assert found.last_step == 0

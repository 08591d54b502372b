"""Learning rates computed by hand."""

import pytest

from tiercel.config.schema import Optim
from tiercel.errors import RecipeError
from tiercel.training.run_length import require_schedule
from tiercel.training.schedule import learning_rate


def rates(total: int, **keys) -> list[float]:
    optim = Optim(lr=1.0, **keys)
    return [learning_rate(optim, step, total) for step in range(total)]


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "min_lr": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine"}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        ({"schedule": "cosine", "min_lr": 0.5}, [1, 0.75 + 0.5**2.5, 0.75, 0.75 - 0.5**2.5]),
        ({"schedule": "wsd", "decay_steps": 2}, [1, 1, 1, 0.5]),
        ({"schedule": "wsd", "decay_steps": 2, "min_lr": 0.4, "warmup_steps": 1}, [1, 1, 1, 0.7]),
    ],
)
def test_rates_of_four_steps(keys, expected):
    assert rates(4, **keys) == pytest.approx(expected)


def test_the_decay_of_wsd_is_a_tenth_of_the_run():
    assert rates(40, schedule="wsd")[35:] == pytest.approx([1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("keys", "last"),
    (
        ({"warmup_steps": 8}, 7),
        ({"warmup_steps": 4, "schedule": "wsd", "decay_steps": 9}, 12),
        ({"warmup_steps": 38, "schedule": "wsd"}, 40),  # falls over a tenth
    ),
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(keys, last):
    with pytest.raises(RecipeError):
        require_schedule(Optim(**keys), last)
    require_schedule(Optim(**keys), last + 2)

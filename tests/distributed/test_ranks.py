"""Communication between ranks."""

from dataclasses import dataclass
from typing import Any

import pytest

from tiercel.distributed.ranks import Ranks
from tiercel.errors import EXIT_TRAINING, ElsewhereError, TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class First(Ranks):
    """The first of two ranks, of which the second is made up: it says what `second` is."""

    second: Any
    world_size: int = 2

    def all_gather(self, value: Any, *, anywhere: bool = False) -> list[Any]:
        return [value, self.second]


def fail() -> None:
    raise TrainingError("the loss finite")


def test_a_rank_knows_why_another_failed():
    ranks = First(second=(EXIT_TRAINING, "the loss finite"))
    with pytest.raises(ElsewhereError, match=r"^rank 1 failed: the loss finite$") as caught:
        ranks.run_on_all(lambda: None)
    assert caught.value.exit_code == EXIT_TRAINING


def test_the_first_rank_that_failed_raises_its_own_error():
    with pytest.raises(TrainingError, match=r"^the loss finite$"):
        First(second=(EXIT_TRAINING, "the disk is full")).run_on_all(fail)
    assert First(second=None).run_on_all(lambda: 7) == 7

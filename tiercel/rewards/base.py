"""Define the base classes of all rewards. A reward is one frozen class: the keys of its entry in the recipe, its
checks, and its score.

A class whose score needs a process, a server or a model has no `score` here; rewards/runtime/batches.py starts it.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from tiercel.config_base import FiniteFloat, Keys, Problems, Section
from tiercel.reward_types import Sample, column
from tiercel.rewards.ground_truth import Truth

ANSWER = "answer"


class RowFilter(Section):
    """Rows that a reward applies to; it does not apply to the others and leaves their sum."""

    column: str
    """Column of the row; a dot leads into a column, as in extra_info.split."""
    equals: tuple[str, ...]
    """The values of such rows, as text: 7 is "7", true is "true"."""

    def holds(self, columns: Mapping[str, Any]) -> bool:
        """Return whether the filter selects a row with these columns."""
        return column_text(column(columns, self.column)) in self.equals


def column_text(value: object) -> str:
    """Return a column's value as text in the form in which recipes write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class RewardEntry(Section):
    """One reward: a built-in by `name`, or your own function by `call`."""

    reads: ClassVar[str] = ""  # what it takes as the model's answer, for docs/rewards.md; its docstring is the value
    needs: ClassVar[str | None] = None  # a package that it needs in addition to tiercel's own
    own_right_from: ClassVar[float | None] = None  # right from this value on; None if the reward does not judge
    takes_time: ClassVar[bool] = False  # a batch may take up to reliability.reward_timeout seconds

    name: str | None = None
    """A built-in reward."""
    weight: FiniteFloat = 1.0
    """Factor of this reward in the sum; a reward with 0 is only measured."""
    where: RowFilter | None = None

    @property
    def title(self) -> str:
        """Return its name in metrics and rollouts, before a number is added if the name is used twice."""
        return self.name or ""

    @property
    def right_from(self) -> float | None:
        """Return the value from which on a completion is right; None if the reward does not judge it."""
        return self.own_right_from

    def problems(self, before: Sequence["RewardEntry"]) -> Problems:
        """Check the entry beyond the types of its keys. `before` are the entries before it in the list. The keys of the
        problems are relative to the entry, and empty for the entry itself."""
        yield from ()

    def missing(self) -> Problems:
        """Yield what the reward needs that this machine or environment lacks."""
        if self.needs is not None and not find_spec(self.needs):
            text = f"{self.name} needs the package {self.needs}, which is not installed; pip install 'tiercel[rewards]'"
            yield Keys("name").problem(text)

    def score(self, sample: Sample) -> float | None:
        """Return the reward of a completion; None if it does not apply to the row."""
        raise NotImplementedError(f"{type(self).__name__} is scored in batches")

    def score_after(self, sample: Sample, is_right: bool | None) -> float | None:
        """Do the same; `is_right` is whether the rewards before this one judged the completion to be right."""
        return self.score(sample)


class Reward(RewardEntry):
    """A reward that may tell right completions from wrong ones."""

    correct_at: FiniteFloat | None = None
    """A row counts as right for eval/accuracy from this value on; null takes the built-in's own (iou 0.5, else 1)."""

    @property
    def right_from(self) -> float | None:
        return self.own_right_from if self.correct_at is None else self.correct_at


class TruthReward(Reward):
    """A reward that compares with the row's right answer; it does not apply to a row without one."""

    answer_column: str | None = None
    """Column of the row that holds the right answer, where a dot leads into a column (reward_model.ground_truth); null
    takes `answer`."""

    @property
    def truth_column(self) -> str:
        """Return the name of the column with the right answer."""
        return self.answer_column or ANSWER

    def truth_of(self, answer: Any, columns: Mapping[str, Any]) -> Any:
        """Return the right answer of a row, or None if it has none. `answer` is what the row's format takes as the
        right answer."""
        name = self.truth_column
        return answer if name == ANSWER and answer is not None else column(columns, name)

    def truth(self, sample: Sample) -> Truth | None:
        """Return the row's right answer, or None if the row has none."""
        value, name = self.truth_of(sample.answer, sample.columns), self.truth_column
        return None if value is None else Truth(value=value, sample=sample, column=name, reward=self.title)

    def score(self, sample: Sample) -> float | None:
        truth = self.truth(sample)
        return None if truth is None else self.compare(sample, truth)

    def compare(self, sample: Sample, truth: Truth) -> float:
        """Return the reward of a completion whose row has a right answer. Raises DataError if the right answer cannot
        be read."""
        raise NotImplementedError(f"{type(self).__name__} is scored in batches")


def is_meant(reward: RewardEntry, columns: Mapping[str, Any]) -> bool:
    """Return whether an entry applies to the row with these columns."""
    return reward.where is None or reward.where.holds(columns)

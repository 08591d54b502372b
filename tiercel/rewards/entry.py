"""The base of all rewards. A reward is one frozen class: the keys of its entry in the recipe, its checks, its score.

A class whose score needs a process, a server or a model has no `score` here; tiercel/scoring/batches.py starts it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar

from tiercel.rewards.truths import Truth
from tiercel.samples import Sample
from tiercel.sections import FiniteFloat, Keys, Problems, Section


class Where(Section):
    """Rows that a reward applies to; it does not apply to the others and leaves their sum."""

    column: str
    """Column of the row."""
    equals: tuple[str, ...]
    """The values of such rows, as text: 7 is "7", true is "true"."""


class Entry(Section):
    """One reward: a built-in by `name`, or your own function by `call`."""

    reads: ClassVar[str] = ""  # what it takes as the model's answer, for docs/rewards.md; its docstring is the value
    needs: ClassVar[str | None] = None  # a package beyond tiercel's own
    own_right_from: ClassVar[float | None] = None  # a completion is right from this value on; None: it does not tell
    takes_time: ClassVar[bool] = False  # a batch may take up to reliability.reward_timeout seconds

    name: str | None = None
    """A built-in reward."""
    weight: FiniteFloat = 1.0
    """Factor of this reward in the sum."""
    where: Where | None = None

    @property
    def title(self) -> str:
        """Return its name in metrics and rollouts, before a number is added where the name comes twice."""
        return self.name or ""

    @property
    def right_from(self) -> float | None:
        """Return the value from which on a completion is right; None where the reward does not tell."""
        return self.own_right_from

    def problems(self, before: Sequence["Entry"]) -> Problems:
        """Judge the entry beyond the types of its keys; `before` are the entries ahead of it in the list. Keys of the
        problems are those of the entry, empty for the entry itself."""
        yield from ()

    def missing(self) -> Problems:
        """Say what the reward needs that this machine or environment lacks."""
        if self.needs is not None and not find_spec(self.needs):
            text = f"{self.name} needs the package {self.needs}, which is not installed; pip install 'tiercel[rewards]'"
            yield Keys("name").problem(text)

    def score(self, sample: Sample) -> float | None:
        """Return the reward of a completion; None where it does not apply to the row."""
        raise NotImplementedError(f"{type(self).__name__} is scored in batches")

    def score_after(self, sample: Sample, is_right: bool | None) -> float | None:
        """Do the same, told whether the completion is right by the rewards before."""
        return self.score(sample)


class Reward(Entry):
    """A reward that may tell right completions from wrong ones."""

    correct_at: FiniteFloat | None = None
    """A row counts as right for eval/accuracy from this value on; null takes the built-in's own (iou 0.5, else 1)."""

    @property
    def right_from(self) -> float | None:
        return self.own_right_from if self.correct_at is None else self.correct_at


class TruthReward(Reward):
    """A reward that compares with the row's right answer; it does not apply to a row without one."""

    answer_column: str | None = None
    """Column of the row that holds the right answer; null takes `answer`."""

    def truth(self, sample: Sample) -> Truth | None:
        """Return the row's right answer, None where the row has none."""
        column = self.answer_column or "answer"
        value = sample.answer if column == "answer" else sample.columns.get(column)
        return None if value is None else Truth(value=value, sample=sample, column=column, reward=self.title)

    def score(self, sample: Sample) -> float | None:
        truth = self.truth(sample)
        return None if truth is None else self.compare(sample, truth)

    def compare(self, sample: Sample, truth: Truth) -> float:
        """Return the reward of a completion whose row has a right answer. Raises DataError where that cannot be
        read."""
        raise NotImplementedError(f"{type(self).__name__} is scored in batches")

"""Score groups: every reward of the recipe, their weighted sum, and whether each completion is right.

A reward that returns None does not apply and is left out of the weighted sum, which is not rescaled. A completion with
a failed reward, or with none that applies, is masked: its total is None.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import compress, repeat

from tiercel.config.schema import Reliability
from tiercel.errors import DataError, RecipeError
from tiercel.reward_types import Turn
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.external import ByCall
from tiercel.rewards.grounding import GROUNDING
from tiercel.rewards.runtime.batches import AnswerReward, BatchReward, batch_reward
from tiercel.rewards.runtime.pictures import PictureFiles
from tiercel.rewards.runtime.wire import LARGEST_VALUE
from tiercel.types import (
    Completion,
    CoordinateSpace,
    EncodedPrompt,
    Group,
    ImagePlan,
    Message,
    RewardValue,
    Sample,
    SampleImage,
    ScoredCompletion,
    ScoredGroup,
)


def reward_names(rewards: Sequence[RewardEntry]) -> tuple[str, ...]:
    """Return the rewards' names in metrics and rollouts: the name of the built-in reward or of the function; from its
    second use on, NAME_2 ..."""
    names: list[str] = []
    for reward in rewards:
        name, count = reward.title, 1
        while name in names:
            count += 1
            name = f"{reward.title}_{count}"
        names.append(name)
    return tuple(names)


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    return tuple(Turn(role=message.role, content=message.content) for message in messages)


def make_sample(
    prompt: EncodedPrompt,
    completion: Completion,
    coordinate_space: CoordinateSpace | None,
    files: Sequence[str | None] = (),
) -> Sample:
    """Make the Sample of one completion, which is what rewards see. `prompt.row` has at least one user turn. `files`
    are those of its pictures; empty if no reward opens them."""
    row = prompt.row
    images = tuple(
        SampleImage(
            path=path,
            original_size=image.plan.original_size,
            processed_size=image.plan.processed_size,
            file=file,
            grid_thw=_grid_thw(image.plan),
        )
        for path, file, image in zip(prompt.image_paths, files or repeat(None), prompt.images, strict=False)
    )
    return Sample(
        id=row.id,
        prompt=next(message.content for message in reversed(row.messages) if message.role == "user"),
        completion=completion.text,
        token_count=completion.sampled_count,
        is_truncated=completion.is_truncated,
        answer=row.answer,
        columns=row.columns,
        images=images,
        coordinate_space=coordinate_space,
        messages=turns_of(prompt.messages),
        turns=() if completion.trajectory is None else completion.trajectory.turns,
        answer_image=row.answer_visual,
        answer_space=row.answer_space,
        outcome=None if completion.trajectory is None else completion.trajectory.outcome,
        named=row.named,
        opened=prompt.opened,
    )


def _grid_thw(plan: ImagePlan) -> tuple[int, int, int] | None:
    """Return the patches (t, h, w) of a picture, which families of Qwen have; None for others."""
    if plan.fps is not None or len(plan.grid) != 3:
        return None
    return plan.grid[0], plan.grid[1], plan.grid[2]


def weighted_sum(values: Sequence[RewardValue], weights: Sequence[float]) -> float | None:
    """Sum weight * value over the rewards that apply. A reward of weight 0 is only measured, unless all have weight 0.
    None if one of the others failed, if none of them applies, or if the sum exceeds fp32."""
    if not values:
        return 0.0
    weighted = list(zip(values, weights, strict=True))
    counted = [(value, weight) for value, weight in weighted if weight] or weighted
    if any(value.failure is not None for value, _ in counted):
        return None
    terms = [weight * value.value for value, weight in counted if value.value is not None]
    total = sum(terms) if terms else math.nan
    return total if abs(total) <= LARGEST_VALUE else None


def is_right(values: Sequence[RewardValue], thresholds: Sequence[float | None]) -> bool | None:
    """Decide whether a completion is right by the first reward that has a threshold and applies: value >= threshold.

    If that reward failed, the completion is wrong: what cannot be scored earns nothing. None if no reward with a
    threshold applies.
    """
    for value, threshold in zip(values, thresholds, strict=True):
        if threshold is None:
            continue
        if value.failure is not None:
            return False
        if value.value is not None:
            return value.value >= threshold
    return None


Judgements = Sequence[bool | None]  # whether each sample is right, by the rewards before
Prompts = Sequence[EncodedPrompt]  # the prompts of the samples


def require_coordinates(rewards: Sequence[RewardEntry], coordinate_space: CoordinateSpace | None) -> None:
    """Raise RecipeError if a reward reads boxes and it is not known how the model's family writes them."""
    problems = [
        f"rewards.{index}.name: {reward.title} reads boxes, and this model's family does not document how it writes "
        "them; set data.coordinates, or use a reward without boxes"
        for index, reward in enumerate(rewards)
        if coordinate_space is None and isinstance(reward, GROUNDING)
    ]
    if problems:
        raise RecipeError(problems)


class Scorer:
    """The rewards of a recipe. As a context manager it starts the processes of the user's own rewards and ends them."""

    def __init__(
        self, rewards: Sequence[RewardEntry], reliability: Reliability, coordinate_space: CoordinateSpace | None
    ):
        """Prepare the rewards. `coordinate_space` is the one that the model's family writes boxes in. Raises
        RecipeError if it is not known and a reward reads boxes."""
        require_coordinates(rewards, coordinate_space)
        self.names = reward_names(rewards)
        self.coordinate_space: CoordinateSpace | None = coordinate_space
        self._processes = ExitStack()
        self._rewards = tuple((reward, batch_reward(reward, reliability)) for reward in rewards)
        self._opens_pictures = any(isinstance(reward, ByCall) for reward in rewards)
        self._weights = [reward.weight for reward in rewards]
        self._right_from = [reward.right_from for reward in rewards]

    def __enter__(self) -> "Scorer":
        """Start every reward that needs it. Raises one RecipeError with everything that cannot be loaded, and all
        environment variables that are not set."""
        problems: list[str] = []
        with ExitStack() as processes:
            for index, (reward, batch) in enumerate(self._rewards):
                entry = f"rewards.{index}"
                missing = [problem.below(entry).line for problem in reward.missing()]
                problems += missing
                if batch is None or (missing and not isinstance(reward, ByCall)):  # a package is missing
                    continue
                processes.callback(batch.close)
                try:
                    batch.start()
                except RecipeError as error:
                    key = "call" if isinstance(reward, ByCall) else "name"
                    problems += [f"{entry}.{key}: {problem}" for problem in error.problems]
            if problems:
                raise RecipeError(problems)
            self._processes = processes.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def score(self, groups: Sequence[Group]) -> tuple[ScoredGroup, ...]:
        """Score every completion; each reward of the user sees all of them as one batch."""
        prompts = [group.prompt for group in groups for _ in group.completions]
        with PictureFiles() as pictures:
            samples: list[Sample] = []
            for group in groups:
                files = pictures.of(group.prompt) if self._opens_pictures else ()
                space = self.coordinate_space
                samples += [make_sample(group.prompt, each, space, files) for each in group.completions]
            rewards = iter(self.score_samples(samples, prompts))
        return tuple(
            ScoredGroup(
                group=group,
                completions=tuple(self._scored(completion, next(rewards)) for completion in group.completions),
            )
            for group in groups
        )

    def score_samples(self, samples: Sequence[Sample], prompts: Prompts) -> tuple[dict[str, RewardValue], ...]:
        """Return the rewards of each sample by name, in the recipe's order. `prompts` are those of the samples."""
        found: list[list[RewardValue]] = [[] for _ in samples]
        for reward, batch in self._rewards:
            right = [is_right(values, self._right_from[: len(values)]) for values in found]
            for values, value in zip(found, _values(reward, batch, samples, right, prompts), strict=True):
                values.append(value)
        return tuple(dict(zip(self.names, values, strict=True)) for values in found)

    def _scored(self, completion: Completion, rewards: Mapping[str, RewardValue]) -> ScoredCompletion:
        if (failure := completion.failure) is not None:
            rewards = {name: RewardValue(value=None, failure=failure) for name in rewards}
        values = tuple(rewards.values())
        return ScoredCompletion(
            completion=completion,
            rewards=rewards,
            total=weighted_sum(values, self._weights) if failure is None else None,
            is_correct=is_right(values, self._right_from),
        )


def _values(
    reward: RewardEntry, batch: BatchReward | None, samples: Sequence[Sample], right: Judgements, prompts: Prompts
) -> tuple[RewardValue, ...]:
    """Ask a reward for its value of each sample. It does not apply to rows that the entry does not select."""
    is_meant = [reward.where is None or reward.where.holds(sample.columns) for sample in samples]
    meant = [*compress(samples, is_meant)]
    if batch is None:
        found = iter([_own_value(reward, *each) for each in zip(meant, compress(right, is_meant), strict=True)])
    elif isinstance(batch, AnswerReward):
        found = iter(batch.score_answers(meant, [*compress(prompts, is_meant)]))
    else:
        found = iter(batch.score(meant))
    return tuple(next(found) if each else RewardValue(value=None) for each in is_meant)


def _own_value(reward: RewardEntry, sample: Sample, is_right: bool | None) -> RewardValue:
    """Return the value of a reward that scores by itself."""
    try:
        value = reward.score_after(sample, is_right)
    except DataError as error:
        return RewardValue(value=None, failure=str(error))
    except (ArithmeticError, ValueError, RecursionError) as error:  # because of what a model may write
        return RewardValue(value=None, failure=f"reward {reward.name}, row {sample.id}: {error!r}")
    if value is not None and not abs(value) <= LARGEST_VALUE:
        return RewardValue(value=None, failure=f"reward {reward.name}, row {sample.id}: {value} is not a reward")
    return RewardValue(value=value)

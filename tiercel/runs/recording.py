"""Groups as the run records them: gathered from all ranks, without pixels, as lines of rollouts/ and evaluations/."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from tiercel.distributed.ranks import Ranks
from tiercel.runs.records import CompletionRecord, Folder, GroupRecord, ImageRecord, TurnRecord, finite
from tiercel.types import Completion, CoordinateSpace, EncodedImage, Group, ScoredGroup, Trajectory


def gathered_groups(
    ranks: Ranks, scored: Sequence[ScoredGroup], advantages: Sequence[Sequence[float | None]]
) -> list[tuple[ScoredGroup, Sequence[float | None]]]:
    """Gather the groups of all ranks with their advantages to the first rank, in the global order and without pixels.
    The other ranks get an empty list."""
    own = [(_without_pixels(group), values) for group, values in zip(scored, advantages, strict=True)]
    every = [entry for entries in ranks.gather_on_first(own) for entry in entries]
    return sorted(every, key=lambda entry: entry[0].group.prompt.index)


def images_of(group: Group) -> tuple[EncodedImage, ...]:
    """Return the pictures of the prompt, then those in the environment's answers to its completions."""
    trajectories = [each.trajectory for each in group.completions if each.trajectory is not None]
    return group.prompt.images + tuple(image for trajectory in trajectories for image in trajectory.images)


def pictured(groups: Sequence[Group], most: int | None, folder: Folder) -> frozenset[int]:
    """Return the indices of the prompts whose pictures the run keeps: of a step's rollouts the first `most` that have
    any, of held-out rows all, unless `most` is 0."""
    indices = [group.prompt.index for group in groups if images_of(group)]
    return frozenset(indices if most and folder == "evaluations" else indices[:most])


def _without_pixels(scored: ScoredGroup) -> ScoredGroup:
    prompt = replace(scored.group.prompt, images=_bare(scored.group.prompt.images))
    completions = tuple(replace(each, completion=_bare_completion(each.completion)) for each in scored.completions)
    group = replace(scored.group, prompt=prompt, completions=tuple(each.completion for each in completions))
    return replace(scored, group=group, completions=completions)


def _bare_completion(completion: Completion) -> Completion:
    trajectory = completion.trajectory
    if trajectory is None:
        return completion
    return replace(completion, trajectory=replace(trajectory, images=_bare(trajectory.images)))


def _bare(images: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
    return tuple(replace(image, views=()) for image in images)


def group_record(group: ScoredGroup, advantages: Sequence[float | None], space: CoordinateSpace | None) -> GroupRecord:
    """Build the record of a prompt and its completions. `space` is the one that the model writes boxes in."""
    prompt = group.group.prompt
    return GroupRecord(
        coordinate_space=space,
        id=prompt.row.id,
        index=prompt.index,
        policy_version=group.group.policy_version,
        prompt=prompt.text,
        question=next(message.content for message in reversed(prompt.row.messages) if message.role == "user"),
        answer=prompt.row.answer,
        answer_image=prompt.row.answer_visual,
        answer_space=prompt.row.answer_space,
        images=tuple(_image_record(image, path) for image, path in zip(prompt.images, prompt.image_paths, strict=True)),
        completions=tuple(
            CompletionRecord(
                text=scored.completion.text,
                tokens=scored.completion.sampled_count,
                token_ids=tuple(scored.completion.token_ids_L.tolist()),
                seed=scored.completion.seed,
                is_truncated=scored.completion.is_truncated,
                rewards={name: value.value for name, value in scored.rewards.items()},
                failures={name: value.failure for name, value in scored.rewards.items() if value.failure},
                total=scored.total,
                is_correct=scored.is_correct,
                advantage=advantage,
                forks=scored.completion.forks,
                turns=_turns(scored.completion.trajectory),
                teacher=tuple((text, finite(round(gap, 4))) for text, gap in scored.teacher_gaps),
            )
            for scored, advantage in zip(group.completions, advantages, strict=True)
        ),
    )


def _image_record(image: EncodedImage, path: str | None) -> ImageRecord:
    return ImageRecord(
        sha256=image.sha256,
        path=path,
        original_size=image.plan.original_size,
        processed_size=image.plan.processed_size,
    )


def _turns(trajectory: Trajectory | None) -> tuple[TurnRecord, ...]:
    if trajectory is None:
        return ()
    images = iter(trajectory.images)
    return tuple(
        TurnRecord(
            start=start,
            stop=stop,
            text=turn.text,
            calls=turn.calls,
            answer=turn.answer,
            images=tuple(_image_record(image, None) for image in islice(images, len(turn.images))),
        )
        for (start, stop), turn in zip(trajectory.spans, trajectory.turns, strict=True)
    )

"""A few of a step's rollouts as pictures with captions, made from nothing but the run directory."""

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from tiercel.reliability.redaction import redact
from tiercel.reward_types import Box
from tiercel.runs.pictures import picture_file
from tiercel.runs.records import CompletionRecord, GroupRecord, ImageRecord, groups_path
from tiercel.trackers.tracker import TrackedPicture
from tiercel.web.report.boxes import answer_image, has_boxes, placed, predicted_box, true_box
from tiercel.web.report.numbers import evenly_spaced
from tiercel.web.report.pictures import opened
from tiercel.web.report.reading import group_file

MOST = 4
LONGEST_SIDE = 512  # pixels
LONGEST_TEXT = 300  # characters of a prompt, and of a completion
TRUE, PREDICTED = (0, 158, 115), (213, 94, 0)  # green and vermilion, which colour-blind people can distinguish


def rollout_pictures(run: Path, step: int) -> list[TrackedPicture]:
    """Return pictures of the first completions of at most MOST prompts whose image is kept, spread over the step. The
    true box is green and the completion's is red. Raises RunError or OSError if a file cannot be read."""
    groups = group_file(groups_path(run, "rollouts", step), step).groups
    shown = [group for group in groups if group.images and os.path.lexists(_file_of(run, group))]
    return [_picture(run, group) for group in evenly_spaced(shown, MOST)]


def _file_of(run: Path, group: GroupRecord) -> Path:
    return picture_file(run / "images", group.images[answer_image(group)].sha256)


def _picture(run: Path, group: GroupRecord) -> TrackedPicture:
    record, completion = group.images[answer_image(group)], group.completions[0]
    with opened(_file_of(run, group)) as stored:
        image = stored.convert("RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    if has_boxes(group):
        boxes = [(true_box(group), TRUE), (predicted_box(group, completion), PREDICTED)]
        _draw(image, record, [(box, colour) for box, colour in boxes if box is not None])
    return TrackedPicture(image=image, caption=caption(group, completion))


def _draw(image: Image.Image, record: ImageRecord, boxes: Sequence[tuple[Box, tuple[int, int, int]]]) -> None:
    """Draw boxes given in pixels of the original image."""
    pen = ImageDraw.Draw(image)
    for box, colour in boxes:
        on_image = placed(box, record.original_size, image.size)
        pen.rectangle(on_image, outline=colour, width=max(1, max(image.size) // 128))


def caption(group: GroupRecord, completion: CompletionRecord) -> str:
    """Return a caption with the prompt, the completion, turn by turn if it has several, and its reward, without secrets
    and control characters."""
    reward = "masked" if completion.total is None else f"{completion.total:.4g}"
    texts = [_shown(turn.text) for turn in completion.turns]
    said = "\n".join(f"turn {number}: {text}" for number, text in enumerate(texts, start=1))
    return f"prompt: {_shown(group.question)}\n{said or f'completion: {_shown(completion.text)}'}\nreward: {reward}"


def _shown(text: str) -> str:
    text = redact(text)
    text = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)

"""Encode rows in loader workers: decode and resize the images, render and tokenise the turns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tiercel.config.schema import BaseRecipe, Data, DistillRecipe, GrpoRecipe, KtoRecipe, OfflineRecipe, RewardRecipe
from tiercel.data.formats.preferences import wanted_margin
from tiercel.data.marks import fill_prompt
from tiercel.data.media.images import decode
from tiercel.data.media.videos import VideoHeader, decode_video, open_video
from tiercel.data.order import RowOrder
from tiercel.data.row_table import RowTable
from tiercel.data.stores import view_of
from tiercel.errors import DataError, RecipeError
from tiercel.models.families.base import Family
from tiercel.models.prompts import encode_conversation, encode_prompt
from tiercel.types import (
    EncodedConversation,
    EncodedImage,
    EncodedPrompt,
    Example,
    ImagePlan,
    ImageSource,
    PixelLimits,
    Row,
    Size,
    VideoSource,
)

T = TypeVar("T")
NEXT_ROWS = 8  # whose answers KTO may borrow


def prompt_encoder(family: Family, data: Data) -> Callable[[Row, int], EncodedPrompt]:
    """Make the function that encodes a row as a prompt to sample after, for GRPO and evaluation."""
    return partial(_encode, family, data, encode_prompt)


def taught_prompt_encoder(family: Family, recipe: GrpoRecipe) -> Callable[[Row, int], EncodedPrompt]:
    """Make the function that encodes a row as a prompt to learn from."""
    return partial(_usable_prompt, family, recipe)


def _usable_prompt(family: Family, recipe: GrpoRecipe, row: Row, index: int) -> EncodedPrompt:
    require_usable(recipe, row)
    return _encode(family, recipe.data, encode_prompt, row, index)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleEncoder:
    """Encodes rows as what an offline recipe learns from: one conversation, or for a pair one conversation for each
    side."""

    recipe: OfflineRecipe
    family: Family
    rows: Sequence[Row]  # all of them; a labelled row borrows the answer of the next in this order
    order: RowOrder

    def __call__(self, row: Row, index: int) -> Example:
        """Encode a row. Raises DataError."""
        require_usable(self.recipe, row)
        data, sides = self.recipe.data, row.sides if self.recipe.purpose == "pairs" else (row,)
        conversations = [_encode(self.family, data, encode_conversation, side, index) for side in sides]
        if isinstance(self.recipe, KtoRecipe) and self.recipe.kto.loss == "kto":  # the other losses need no divergence
            conversations.append(self._with_borrowed_answer(row, index))
        return Example(conversations=tuple(conversations))

    def _with_borrowed_answer(self, row: Row, index: int) -> EncodedConversation:
        """Encode the row with the answer of the next row that asks something else and whose answer can be used: the row
        is not to blame for that of another one, nor for its length. If all of the next NEXT_ROWS ask the same, the
        first of them lends its answer. Raises DataError if none can."""
        same: EncodedConversation | None = None
        for ahead in range(1, NEXT_ROWS + 1):
            with suppress(DataError):
                other = self._row_ahead(index, ahead)
                if not _asks_the_same(row, other):
                    return self._with_answer_of(row, other, index)
                same = same or self._with_answer_of(row, other, index)
        return same or self._with_answer_of(row, self._row_ahead(index, NEXT_ROWS), index)

    def _row_ahead(self, index: int, ahead: int) -> Row:
        return self.rows[self.order.row(index + ahead)]

    def _with_answer_of(self, row: Row, other: Row, index: int) -> EncodedConversation:
        data = self.recipe.data
        twice = data.model_copy(update={"max_prompt_tokens": 2 * data.max_prompt_tokens})
        return _encode(self.family, twice, encode_conversation, with_answer_of(row, other), index)


def _asks_the_same(row: Row, other: Row) -> bool:
    """Return whether two rows have the same turns before the answer, and the same pictures."""
    return row.messages[:-1] == other.messages[:-1] and row.visuals == other.visuals


def require_usable(recipe: BaseRecipe, row: Row) -> None:
    """Raise DataError if a row lacks what the recipe needs in addition to its turns: a margin, the columns of a
    teacher's prompt, or an answer to learn from off policy."""
    if isinstance(recipe, RewardRecipe):
        wanted_margin(row, recipe.ranking)
    taught = recipe.taught_by if isinstance(recipe, GrpoRecipe) else None
    if taught is not None and taught.prompt is not None:
        fill_prompt(row.messages, taught.prompt, {**row.columns, "answer": row.answer}, "the teacher's prompt")
    if isinstance(recipe, DistillRecipe) and recipe.teacher.rows_share and row.messages[-1].role != "assistant":
        raise DataError("has no answer, but teacher.rows_share needs one", field="messages")


def with_answer_of(row: Row, other: Row) -> Row:
    """Return the row with the last answer of another. The boxes of that answer count as boxes on this row's first
    image."""
    answer = other.messages[-1]
    kept = sum(message.content.count("<bbox>") for message in row.messages[:-1])
    lent = answer.content.count("<bbox>")
    if lent and not row.images:
        raise DataError("has no picture, so it cannot borrow an answer with boxes", field="boxes")
    return replace(
        row,
        messages=(*row.messages[:-1], answer),
        boxes=row.boxes[:kept] + other.boxes[len(other.boxes) - lent :],
        box_images=row.box_images[:kept] + (0,) * lent,
    )


def row_images(family: Family, data: Data, row: Row) -> list[EncodedImage]:
    """Decode and resize a row's images and videos, in the order of their marks. Raises DataError."""
    return [_visual(family, data, row, source) for source in row.visuals]


_decoded: ContextVar[dict[Any, EncodedImage] | None] = ContextVar("decoded", default=None)


@contextmanager
def decoding_once() -> Iterator[None]:
    """Decode each picture and video once for all rows, and for both sides of a pair, that are encoded inside."""
    token = _decoded.set({})
    try:
        yield
    finally:
        _decoded.reset(token)


def _visual(family: Family, data: Data, row: Row, source: ImageSource | VideoSource) -> EncodedImage:
    known, roots, key = _decoded.get(), row.image_roots, (source, row.image_roots, row.pixels)
    if known is not None and key in known:
        return known[key]
    if isinstance(source, VideoSource):
        header = open_video(source, roots, data)
        frames = decode_video(source, roots, data, header)
        encoded = family.encode_video(frames, _video_plan(family, data, header))
    else:
        encoded = family.encode_image(decode(source, roots, data.max_image_pixels), row.pixels)
    if known is not None:
        known[key] = encoded
    return encoded


def decode_videos(data: Data, row: Row) -> None:
    """Decode every frame that a run would take from a row's videos, as a check. Raises DataError."""
    for source in row.videos:
        for _ in decode_video(source, row.image_roots, data, open_video(source, row.image_roots, data)):
            pass


def row_plans(family: Family, data: Data, row: Row, sizes: Sequence[Size]) -> list[ImagePlan]:
    """Plan a row's images and videos, in the order of their marks. `sizes` are those of the images. Raises
    DataError."""
    left = iter(sizes)
    plans = []
    for source in row.visuals:
        if isinstance(source, VideoSource):
            plans.append(_video_plan(family, data, open_video(source, row.image_roots, data)))
        else:
            plans.append(family.plan_image(next(left), row.pixels))
    return plans


def require_readable(recipe: BaseRecipe, table: RowTable) -> None:
    """Raise RecipeError if the rows have videos, and a server is asked by token ids, of which vLLM reads no times."""
    if isinstance(recipe, GrpoRecipe):
        rollout, taught = recipe.rollout, recipe.taught_by
        takers = []
        if rollout.engine_kind.is_served and rollout.continues:
            takers.append((f"rollout.engine: {rollout.engine} with turns or branches", "vllm or local"))
        if taught is not None and taught.url is not None:
            takers.append(("a teacher's url: a server", "no url"))
        with_videos = np.flatnonzero(view_of(table.rows).column("videos")).tolist() if takers else []
        if with_videos:
            with_video = table.rows[with_videos[0]]
            found = f"takes only images, but row {with_video.id} of {with_video.file} has a video"
            raise RecipeError(
                [f"{taker} {found}; use {other}, or list its frames as images" for taker, other in takers]
            )


def _video_plan(family: Family, data: Data, header: VideoHeader) -> ImagePlan:
    limits = PixelLimits(least=data.video.min_pixels, most=data.video.max_pixels)
    return family.plan_video(header.size, len(header.frame_numbers), header.fps, limits)


def _encode(family: Family, data: Data, encode: Callable[..., T], row: Row, index: int) -> T:
    images = row_images(family, data, row)
    limit = data.max_prompt_tokens
    return encode(family, row, index, images, system=data.system, max_prompt_tokens=limit)

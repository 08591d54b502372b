"""Samples as JSON lines, on their way to a reward's own process. Imports no torch."""

import json
from collections.abc import Mapping
from typing import Any

from tiercel.samples import Sample, SampleImage, Turn

LARGEST_VALUE = 3.4e38  # of a reward: advantages are computed in fp32


class NotJson(ValueError):
    """A sample holds something that JSON cannot carry; the message names row and column."""


def encode_sample(sample: Sample) -> str:
    """Write a sample as one line of JSON. Raises NotJson where a column of the row cannot be carried."""
    fields = {
        "id": sample.id,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "token_count": sample.token_count,
        "is_truncated": sample.is_truncated,
        "answer": sample.answer,
        "columns": dict(sample.columns),
        "images": [
            {"path": image.path, "original_size": image.original_size, "processed_size": image.processed_size}
            for image in sample.images
        ],
        "coordinate_space": sample.coordinate_space,
        "messages": [{"role": turn.role, "content": turn.content} for turn in sample.messages],
    }
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        for column, value in {"answer": sample.answer, **sample.columns}.items():
            if not _is_json(value):
                raise NotJson(
                    f"row {sample.id}, column {column}: a {type(value).__name__} cannot be handed to a reward as JSON "
                    f"({error}); store it as text, a number or a list"
                ) from error
        raise


def decode_sample(fields: Mapping[str, Any]) -> Sample:
    """Read the sample that `encode_sample` wrote; its lists of sizes are tuples again."""
    images = tuple(
        SampleImage(
            path=image["path"],
            original_size=tuple(image["original_size"]),
            processed_size=tuple(image["processed_size"]),
        )
        for image in fields["images"]
    )
    messages = tuple(Turn(**turn) for turn in fields["messages"])
    return Sample(**{**fields, "images": images, "messages": messages})


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True

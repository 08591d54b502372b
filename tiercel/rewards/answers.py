"""Read the answer from a completion. Training and evaluation use this one parser; it imports no torch.

Nothing here guesses: what cannot be read is None.
"""

import re
from collections.abc import Sequence
from itertools import islice

from tiercel.reward_types import Box, Sample
from tiercel.rewards.characters import plain
from tiercel.rewards.choices import LETTERS, parse_choice
from tiercel.rewards.numbers import parse_number

__all__ = [
    "LETTERS",
    "answer_of",
    "extract_answer",
    "parse_box",
    "parse_boxes",
    "parse_choice",
    "parse_number",
    "parse_point",
]

_OPEN_ANSWER = "<answer>"
_CLOSE_ANSWER = "</answer>"
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_CALL = re.compile(r"<\|?tool_call>|\[TOOL_CALLS\]")
_FRAMED = re.compile(r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", re.DOTALL)  # as GLM-4.1V and later write answers
_FRAME = re.compile(r"<\|(?:begin|end)_of_box\|>")

_COORDINATE = r"\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
_BOX = re.compile(
    rf"[\[(]{_COORDINATE},{_COORDINATE},{_COORDINATE},{_COORDINATE}[\])]"
    rf"|[\[(]{_COORDINATE},{_COORDINATE}[\])]\s*(?:,\s*)?[\[(]{_COORDINATE},{_COORDINATE}[\])]"
)
_POINT = re.compile(rf"[\[(]{_COORDINATE},{_COORDINATE}[\])]|\bx\s*={_COORDINATE}(?:,\s*)?y\s*={_COORDINATE}")
LARGEST_COORDINATE = 1e12
MOST_BOXES = 200  # matching them takes time that grows with the cube of their number


def answer_of(sample: Sample) -> str:
    """Return the answer of a completion, by `extract_answer`. There is none if the chat template opened a thought that
    was never closed, or if a trajectory was cut off at a call of a tool."""
    if sample.is_truncated and sample.turns and (sample.turns[-1].calls or _CALL.search(sample.completion)):
        return ""
    return extract_answer(sample.opened + sample.completion)


def extract_answer(completion: str) -> str:
    """Return the content of the last complete <answer>...</answer>, stripped.

    If there is none, return the whole completion without its thoughts, stripped. A thought is <think>...</think>,
    everything before a lone </think> (chat templates may write the opening tag), and everything after a lone <think>
    (it was cut off). Of an answer in which GLM's tokens <|begin_of_box|> and <|end_of_box|> frame one part, that part.
    """
    answer = _whole_answer(completion)
    framed = _FRAMED.findall(answer)
    return framed[0].strip() if len(framed) == 1 else _FRAME.sub(" ", answer).strip()


def _whole_answer(completion: str) -> str:
    last_close = completion.rfind(_CLOSE_ANSWER)
    start = completion.rfind(_OPEN_ANSWER, 0, last_close) if last_close >= 0 else -1
    if start >= 0:
        end = completion.index(_CLOSE_ANSWER, start)
        return completion[start + len(_OPEN_ANSWER) : end]
    closed, tag, rest = completion.rpartition("</think>")  # `rest` does not contain the end of a thought
    unthought = _THOUGHT.sub("", closed + tag).rpartition("</think>")[2] + rest
    return unthought.partition("<think>")[0]


def parse_boxes(text: str) -> list[Box]:
    """Read every list of four numbers in a text, as `parse_box` reads one; at most the first 200."""
    boxes = map(_box_of, islice(_BOX.finditer(plain(text)), MOST_BOXES))
    return [box for box in boxes if box is not None]


def parse_point(text: str) -> tuple[float, float] | None:
    """Read the first pair of numbers in a text: (x, y), [x, y], {"point_2d": [x, y]} or x=1, y=2; None if there is
    none, or if a box comes first."""
    text = plain(text)
    found = _POINT.search(text)
    box = _BOX.search(text)
    if found is None or (box is not None and box.start() <= found.start()):
        return None
    x, y = (float(number) for number in found.groups() if number is not None)
    return (x, y) if _are_coordinates((x, y)) else None


def parse_box(text: str) -> Box | None:
    """Read the first list of four numbers in a text, as written; None if there is none.

    Reads [x1, y1, x2, y2], {"bbox_2d": [x1, y1, x2, y2]}, (x1,y1),(x2,y2) and the same between <|box_start|> and
    <|box_end|>. Corners are neither sorted nor clipped.
    """
    found = _BOX.search(plain(text))
    return None if found is None else _box_of(found)


def _box_of(found: re.Match[str]) -> Box | None:
    x1, y1, x2, y2 = (float(number) for number in found.groups() if number is not None)
    return (x1, y1, x2, y2) if _are_coordinates((x1, y1, x2, y2)) else None


def _are_coordinates(numbers: Sequence[float]) -> bool:
    """Return whether arithmetic on the numbers stays finite; coordinates in a picture are never too large for it."""
    return all(abs(number) <= LARGEST_COORDINATE for number in numbers)

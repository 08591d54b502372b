"""Find where a text states its answer: LaTeX's boxes, "the answer is", and a first guess that is taken back."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_STRONG = r"(?i:final|correct|right)\s{1,4}|最终|最后的?|正确|####"
_ANSWER = re.compile(
    rf"(?P<strong>{_STRONG})?(?:(?i:\banswer)\b(?P<link>\s{{1,4}}(?i:is)\b|\*{{0,2}}\s{{0,4}}[:=])?"
    r"|(?:答案|结果)(?:应该|应当|应|就)?(?:是|为|选|[:=])+|(?<=####))"
)
_TAKEN_BACK = re.compile(
    r"\b(?i:wait|actually|sorry|correction|mistake|mistaken|wrong|instead|rather|no,)(?![a-z])|不对|更正|等等|错|纠正|应该是"
)
_RETRACTED = re.compile(  # from where an answer begins to the end of what takes it back at once
    r"(?:(?![.!?](?:\s|\Z)|。).){0,120}?[^\s.,;:!?…。][\s.,;:!?…。})\]\\$*\"'—-]{1,8}"
    r"(?:(?i:(?:(?:but|oh|oops|hm+|wait|no|actually|sorry)\b[\s.,;:!…—-]{1,4}){1,4}"
    r"(?:(?:that|this|it)(?:\s(?:is|was)|['\u2019]s)\s(?:wrong|incorrect|not\s(?:right|correct))"
    r"|(?:i|we)\smade\san?\s(?:mistake|error))|wait[\s,.…—-]{1,4}no|scratch\sthat|my\smistake)"
    r"(?=\s?[.,;:!…—-](?:\s|\Z)|\s*\Z)"
    r"|(?:(?:等等|等一下|哦|嗯)[\s,.…。!]{0,4})?(?:不对|我?(?:算|数|看|说)?错了)(?=[\s,.;:!…。]|\Z))"
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?i:not|cannot|isn't|isnt|never|neither|nor|rather\s{1,4}than|instead\s{1,4}of|unlike|exclud(?:e|es|ing)"
    r"|eliminat(?:e|es|ing)|rul(?:e|es|ing)\s{1,4}out|ruled\s{1,4}out)\b|n't|n\u2019t|不是|不选|不为|不等于|并非|而非|非|排除|不应选|≠|!=|\\neq?(?![a-z]))"
    r"(?:\s{1,4}(?i:be|option|choice|answer))?[\s:*(\[{$\"'`]{0,8}(?:选项|答案)?\Z"
)


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A span of text that contains an answer."""

    start: int
    end: int
    is_final: bool = False  # the text says that this answer is final
    is_linked: bool = True  # "answer is", not just the word "answer"


def boxes(text: str) -> list[str]:
    r"""Return the content of each \boxed{...}, with balanced braces; one that was cut off is left out."""
    return [text[place.start : place.end] for place in box_places(text)]


def box_places(text: str) -> Iterator[AnswerSpan]:
    """Find the inside of each box."""
    position = 0
    while (found := _BOX.search(text, position)) is not None:
        depth, position = 1, found.end()
        for brace in re.compile(r"[{}]").finditer(text, found.end()):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                yield AnswerSpan(found.end(), brace.start())
                position = brace.end()
                break
        else:
            return


def answer_places(text: str) -> list[AnswerSpan]:
    """Find what follows each "answer is", "answer:", 答案是 or ####, up to the next of them."""
    found = list(_ANSWER.finditer(text))
    ends = [*(each.start() for each in found), len(text)][1:]
    return [
        AnswerSpan(
            each.end(),
            end,
            is_final=each["strong"] is not None,
            is_linked=each["link"] is not None or each[0][-6:].lower() != "answer",
        )
        for each, end in zip(found, ends, strict=bool(found))
    ]


def without_retracted(text: str) -> str:
    """Return what follows the last answer that the text takes back at once, as in "The answer is 5. Wait, no, that is
    wrong." Without such an answer, return the whole text."""
    places = [*box_places(text)] or [place for place in answer_places(text) if place.is_linked]  # a box decides
    ends = [found.end() for place in places if (found := _RETRACTED.match(text, place.start)) is not None]
    return text[max(ends, default=0) :]


def is_denied(text: str, start: int) -> bool:
    """Return whether the words before `start` deny that what begins there is the answer."""
    return _DENIED_BEFORE.search(text[max(0, start - 40) : start]) is not None


def agreed(text: str, said: Sequence[tuple[AnswerSpan, Value]]) -> Value | None:
    """Return the one value that all places state. If they state several, return the last if the text takes the others
    back or says that the last is final; otherwise None."""
    last, value = said[-1]
    for place, other in said[:-1]:
        between = text[place.start : last.start]
        is_replaced = (last.is_final and not place.is_final) or _TAKEN_BACK.search(between[-400:])
        if other != value and not is_replaced:
            return None
    return value

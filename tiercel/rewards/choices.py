"""Read the choice that a text settles on. A text that names several choices, or only denies one, settles on none."""

import functools
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercel.rewards.characters import unadorned
from tiercel.rewards.stated_answers import AnswerSpan, agreed, answer_places, box_places, is_denied, without_retracted

LETTERS = tuple(string.ascii_uppercase)

_LONGEST_TEXT = 20_000  # characters, from the beginning and the end; a model may write without end
_BEGINNING = 1_000
_NEAR = 20  # the most characters between "answer" and its letter

_OPEN = r"[\s(\[{*\"'`$:=]{0,16}"
_CLOSE = r"[\s)\]}*\"'`.,:;!$\u3002]*"
_NOUN = r"(?:(?i:option|choice|answer|letter)\s{1,4}|选项|选择|选)?"
_LEAD = re.compile(rf"{_OPEN}(?:(?i:clearly|definitely|probably|most\slikely|indeed)\s)?{_NOUN}{_OPEN}")
_LINE = re.compile(rf"{_OPEN}{_NOUN}{_OPEN}\Z")
_MARK = re.compile(
    r"[)\]}*]{0,4}(?:[)\].:,、](?=\s+\S|[\u3400-\u9fff])|\n|\s?-\s+(?![A-Z]\s*(?:-|\Z))(?=\S)|\s?\([^()\n]{1,80}\)\s*\Z)"
)
_JOINED = re.compile(
    r"[\s)\]}.\"'*]{0,8}(?:[,、;/&+|]|(?i:\b(?:and|or|nor|vs\.?|versus|to)\b)|[和或与及]|以及|还是|或者){0,2}"
    r"(?:\s{0,4}(?i:and|or|also|both|maybe|perhaps|possibly)\b)?[\s(\[{\"'*]{0,8}"
    r"(?:(?i:option|choice|answer)\s{1,4}|选项|答案)?[(\[{]{0,2}\Z"
)
_ALL_JOINED = re.compile(r"(?i:\b(?:or|nor|and)\b)|[和或与及]")
_DENIED_AFTER = re.compile(
    r"[)\]}\"'*.:]{0,4}\s{0,4}(?:选项)?(?:(?i:is|are|was|were|seems?|looks?|cannot\sbe|can't\sbe|does|do|isn't|aren't|can|has\sto\sbe)\s{0,4})?"
    r"(?i:both\s|all\s|also\s|clearly\s|definitely\s|obviously\s|simply\s)?"
    r"(?:(?i:not\b|wrong|incorrect|false|impossible|ruled\sout|excluded|eliminated|cannot\b|isn't|can't|doesn't|don't)"
    r"|都?(?:错|不对|不正确|不符|不是|不成立|排除|有误|是错))"
)
_ALL_DENIED = re.compile(r"\s(?i:are|were|both|all)\b|都|均")
_CHOSEN_BEFORE = re.compile(
    r"(?:(?i:\b(?:choose|chose|select|pick|go\swith|going\swith|must\sbe)\b)|(?<![不可])选择?|应选|故选)[\s:]{0,4}(?:(?i:option|choice|answer)\s|选项)?[(\[{\"'*]{0,4}\Z"
)
_CHOSEN_AFTER = re.compile(
    r"[)\]}\"'*.:]{0,4}\s{0,4}(?:选项)?(?:(?i:is|seems|looks)\s(?i:also\s|clearly\s|definitely\s|therefore\s)?(?i:the\s)?"
    r"(?i:right|correct|true|best|answer)|也?(?:是)?(?:正确|对的|对(?=[\s,.。]|\Z)))"
)
_WORD_AFTER = re.compile(
    r"['\u2019][a-z]|\s(?!(?i:is|was|and|or|because|since|as|but|not|nor|seems|looks|for|to|over|rather|instead|than)\b)[a-z]"
)
_ANSWERED = re.compile(r"(?:(?i:\banswer(?:\s+is|\s*:))|答案[是为:]+)[\s(*]{0,4}(?i:option\s)?[(]?\Z")
_CONCLUDES = re.compile(r"\b(?i:so|thus|therefore|hence|must|choose|chose|select|pick)\b|所以|因此|故|选")
_SENTENCE = re.compile(r"[.!?](?=\s)|[\n。\uff01\uff1f]")


@dataclass(frozen=True, slots=True)
class ChoiceMention:
    """Choices that a text names together; `choice` is None if they differ."""

    start: int
    end: int
    choice: str | None
    is_chosen: bool  # as in "B is correct" and "choose B"


def parse_choice(text: str, choices: Sequence[str] = LETTERS) -> str | None:
    r"""Read the choice that a text settles on, spelt as in `choices`; None if it settles on none, or on several.

    In this order: the content of \boxed{}; the whole text; a first line or label ("B. the dog"), "the answer is B", "B
    is correct", 选B and a last line, which must agree; the end of the text ("It must be B."). The case of a choice that
    is one letter is ignored only if nothing else is next to it, because "a" is also a word.
    """
    if text.strip() in choices:
        return text.strip()
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_BEGINNING]}\n{text[_BEGINNING - _LONGEST_TEXT :]}"
    spelt = _Spelt.of(tuple(choices))
    text = without_retracted(unadorned(text).replace("$", " "))
    if said := [(place, inside) for place in box_places(text) for inside in _inside(text, place, spelt, choices)]:
        return agreed(text, said)
    is_choice, choice = spelt.whole(text)
    if is_choice:
        return choice
    mentions = spelt.mentions(text)
    evidence = sorted(_evidence(text, mentions, spelt), key=lambda each: each[0].start)
    return agreed(text, evidence) if evidence else _at_end(text, mentions)


def _inside(text: str, place: AnswerSpan, spelt: "_Spelt", choices: Sequence[str]) -> Iterator[str | None]:
    """Yield the choice in a box, if the box names one."""
    inside = text[place.start : place.end]
    if spelt.whole(inside)[0] or spelt.mentions(inside):
        yield parse_choice(inside, choices)


@dataclass(frozen=True, slots=True)
class _Spelt:
    """The choices of a recipe, compiled to patterns."""

    choices: dict[str, str]  # from the spelling in text without adornment to the spelling in the recipe
    mention: re.Pattern[str]
    any_case: re.Pattern[str]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(choices: tuple[str, ...]) -> "_Spelt":
        known = {unadorned(choice).strip(): choice for choice in choices}
        by_length = sorted(known, key=len, reverse=True)  # "no" must not hide "none"
        any_case = "|".join(re.escape(choice) for choice in by_length)
        cased = "|".join(re.escape(each) if len(each) == 1 else f"(?i:{re.escape(each)})" for each in by_length)
        bracketed = "|".join(re.escape(each) for each in by_length if len(each) == 1 and each.isascii()) or r"\Z."
        edges = r"(?<![A-Za-z0-9_\\\-])(?<!不)(?:{})(?![A-Za-z0-9_\-])"
        mention = f"(?<=[(\\[])(?P<bracketed>(?i:{bracketed}))(?=[)\\]])|(?P<choice>{edges.format(cased)})"
        return _Spelt(known, re.compile(mention), re.compile(rf"(?<![A-Za-z0-9_])(?i:{any_case})(?![A-Za-z0-9_])"))

    def spelling(self, found: str) -> str | None:
        """Return a choice as the recipe spells it."""
        same = (each for each in (found, *self.choices) if each in self.choices and each.casefold() == found.casefold())
        return next((self.choices[each] for each in same), None)

    def whole(self, text: str) -> tuple[bool, str | None]:
        """Return whether a text is one or several choices and nothing else, and the choice if it is one."""
        position, found = 0, list[str | None]()
        while (match := self._next(text, position, bool(found))) is not None:
            position = match.end()
            found.append(self.spelling(match.group()))
        is_all = bool(found) and re.compile(_CLOSE).fullmatch(text, position) is not None and None not in found
        return is_all, found[0] if is_all and len(set(found)) == 1 else None

    def _next(self, text: str, position: int, is_further: bool) -> re.Match[str] | None:
        lead = re.compile(_JOINED.pattern.removesuffix(r"\Z")) if is_further else _LEAD
        before = lead.match(text, position)
        return None if before is None else self.any_case.match(text, before.end())

    def mentions(self, text: str) -> list[ChoiceMention]:
        """Find each mention of a choice that is not denied, and join those that are named together."""
        groups: list[list[tuple[int, int, str]]] = []
        for match in self.mention.finditer(text):
            choice = self.spelling(match.group())
            if choice is None or (match.group() in ("A", "I") and _WORD_AFTER.match(text, match.end())):
                continue
            here = (match.start(), match.end(), choice)
            if groups and _JOINED.fullmatch(text, groups[-1][-1][1], match.start()):
                groups[-1].append(here)
            else:
                groups.append([here])
        return list(_asserted(text, groups))


def _asserted(text: str, groups: list[list[tuple[int, int, str]]]) -> Iterator[ChoiceMention]:
    """Leave out the mentions that are denied: the first of a group by the words before it, the last by the words after
    it, and the whole group if its members are joined by "or" or referred to as several."""
    for group in groups:
        names = group
        is_alike = _ALL_JOINED.search(text, group[0][1], group[-1][0]) is not None
        if is_denied(text, names[0][0]):
            names = [] if is_alike else names[1:]
        if names and (after := _DENIED_AFTER.match(text, names[-1][1])) is not None:
            is_answer = _ANSWERED.search(text[max(0, names[0][0] - 30) : names[0][0]]) is not None
            names = (
                names[:1]
                if is_answer and len(names) > 1
                else []
                if is_alike or _ALL_DENIED.search(after.group())
                else names[:-1]
            )
        if names:
            start, end = names[0][0], names[-1][1]
            is_chosen = bool(_CHOSEN_BEFORE.search(text[max(0, start - 40) : start]) or _CHOSEN_AFTER.match(text, end))
            distinct = {choice for _, _, choice in names}
            yield ChoiceMention(start, end, names[0][2] if len(distinct) == 1 else None, is_chosen)


def _evidence(text: str, mentions: Sequence[ChoiceMention], spelt: _Spelt) -> Iterator[tuple[AnswerSpan, str | None]]:
    """Yield the places where the text says which choice it takes."""
    places = answer_places(text)
    for place in places:
        if (found := _answer(text, place, mentions, spelt)) is not None:
            yield found
    for mention in mentions:
        if mention.is_chosen:
            yield AnswerSpan(mention.start, mention.end), mention.choice
    lines = [line for line in re.finditer(r"[^\n]*\S[^\n]*", text)]
    for line in {lines[0], lines[-1]} if lines else ():
        is_choice, choice = spelt.whole(line.group())
        if is_choice:
            yield AnswerSpan(line.start(), line.end()), choice
    labels = [mention for mention in mentions if _is_label(text, mention, places)]
    if labels and len({label.choice for label in labels}) == 1 and _LINE.fullmatch(text, 0, labels[0].start):
        yield AnswerSpan(labels[0].start, labels[0].end), labels[0].choice


def _is_label(text: str, mention: ChoiceMention, places: Sequence[AnswerSpan]) -> bool:
    """Return whether a mention is the label of an option's text, as in "B. the dog"."""
    begins = mention.start == 0 or text[mention.start - 1] in " \n\t([{*"
    is_answer = any(place.start <= mention.start <= place.start + _NEAR for place in places)
    return begins and not is_answer and _MARK.match(text, mention.end) is not None


def _answer(
    text: str, place: AnswerSpan, mentions: Sequence[ChoiceMention], spelt: _Spelt
) -> tuple[AnswerSpan, str | None] | None:
    """Read the choice that follows "the answer is", or else the only choice in that sentence."""
    lead = _LEAD.match(text, place.start, place.end)
    begin = place.start if lead is None else lead.end()
    sentence = _SENTENCE.search(text, begin, place.end)
    end = place.end if sentence is None else sentence.start()
    line = text.find("\n", begin, place.end)
    is_choice, choice = spelt.whole(text[begin : line if line >= 0 else place.end])
    if is_choice:
        return place, choice
    inside = [mention for mention in mentions if place.start <= mention.start < max(end, begin + 1)]
    first = next((mention for mention in inside if mention.start <= begin), None)
    if first is not None:
        return place, first.choice
    if not inside or not place.is_linked:
        return None
    return place, inside[0].choice if len({mention.choice for mention in inside}) == 1 else None


def _at_end(text: str, mentions: Sequence[ChoiceMention]) -> str | None:
    """Return the choice that a text ends with, unless its last sentence also considers another."""
    if not mentions or not re.compile(_CLOSE).fullmatch(text, mentions[-1].end):
        return None
    last = mentions[-1]
    starts = [found.end() for found in _SENTENCE.finditer(text, 0, last.start)]
    start = starts[-1] if starts else 0
    others = [each for each in mentions if start <= each.start < last.start and each.choice != last.choice]
    if others and _CONCLUDES.search(text, others[-1].end, last.start) is None:
        return None
    return last.choice

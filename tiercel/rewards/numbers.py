"""Read the exact number that a text settles on. What cannot be read with certainty is None; a part of it is never read
instead.

A text is split into mentions: everything that may be a number. A mention that cannot be read as a whole (a root, a
product, a decimal comma, a range) has no value, but it still counts as a mention, so that the text does not seem to
settle on another number beside it.
"""

# ruff: noqa: RUF001 (signs that models write, which look like others)

import re
from dataclasses import dataclass
from fractions import Fraction

from tiercel.rewards.characters import unadorned
from tiercel.rewards.stated_answers import agreed, answer_places, box_places, is_denied, without_retracted

_LONGEST = 64  # characters of a number: exact arithmetic on a longer one would take seconds
_LARGEST_EXPONENT = 999
_LONGEST_TEXT = 20_000  # characters, counted from the end of a text; a model may write without end

_GROUPED = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:\{,\}[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}"
    r"|[0-9]{1,3}(?:(?:\u2009|\\,)[0-9]{3})+)(?![0-9])"
)
_DECIMAL = rf"(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_CURRENCY = re.compile(r"(?:(?:US|HK|NT)?\\?[$]|[€£¥₹₩]|(?:USD|EUR|GBP|CNY|RMB)[ ]?)").pattern
_POWER = r"(?:\^|\*\*)[ ]?(?:\{[ ]?[-+]?[0-9]+[ ]?\}|\([ ]?[-+]?[0-9]+[ ]?\)|[-+]?[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)(?:{_CURRENCY}[ ]?(?P<late>[-+]?))?
    (?:
        (?:(?P<whole>[0-9]+)[ ]?)?\\[dtc]?frac[ ]?
        (?:\{{[ ]?(?P<top>{_DECIMAL})[ ]?\}}[ ]?\{{[ ]?(?P<bottom>{_DECIMAL})[ ]?\}}
          |(?P<tops>[0-9])[ ]?(?P<bottoms>[0-9]))
      | (?:(?P<mixed>[0-9]+)[ ])?(?P<numerator>{_DECIMAL})[ ]?/[ ]?(?P<denominator>{_DECIMAL})
      | (?P<mantissa>{_DECIMAL})
        (?: [ \u2009]?(?:\\,)?(?:[xX*×·]|\\times|\\cdot)[ \u2009]?10[ ]?(?P<ten>{_POWER})
          | [eE](?P<shift>[-+]?[0-9]+)(?![0-9A-Za-z])
          | [ ]?(?P<raised>{_POWER})
        )?
    )
    """,
    re.VERBOSE,
)
_FORMULA = r"\\(?:sqrt|pi|infty|[dtc]?frac)(?![a-z])|[√π∞]"  # numbers without a value that still count as mentions
_MENTION = re.compile(rf"{_NUMBER.pattern}|(?P<formula>{_FORMULA})", re.VERBOSE)
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"百": 10**2, "千": 10**3, "万": 10**4, "百万": 10**6, "千万": 10**7, "亿": 10**8, "万亿": 10**12}
_SCALE = re.compile(rf"[ ]?({'|'.join(sorted(_SCALES, key=len, reverse=True))})(?![a-rt-z百千万亿克米瓦卡帕赫分])s?")

_COMMAND = re.compile(r"\\[A-Za-z]+\Z")
_IN_WORD = re.compile(  # as in H2O, GPT-4, m^2, x_1
    r"(?:[A-Za-z_]|[A-Za-z]{2}-|[A-Za-z)\]}][ ]?(?:\^|\*\*)[ ]?[{(]?[ ]?|_\{[ ]?)\Z"
)
_OPERATED = re.compile(
    r"(?:(?<![=-])[<>]|[+*×÷·√±≤≥^]|[0-9A-Za-z)\]}][ ]?/|[0-9][ ]?[:xX]|[0-9A-Za-z)\]}][ ]-"
    r"|\\(?:times|cdot|div|pm|mp|sqrt|leq?|geq?|lt|gt)|\b(?:sin|cos|tan|log|ln|sqrt|root[ ]of)|根号)[ {(\[]{0,3}\Z"
)
_AFTER_OPERAND = re.compile(r"(?:[0-9)\]}|][ ]?|\b[A-Za-z])\Z")  # before a sign that is an operator
_OPERATES = re.compile(
    r"[.,:/'-]?[0-9]|[)\]}]?[ ]?\^(?![{]?[ ]?(?:\\circ|°))|[ ]?[xX][ ]?[0-9]|[xyznkKMBi](?![A-Za-z])|\([0-9]"
    r"|[ ]?(?:[-+*/×÷·±]|\*\*|\\(?:times|cdot|div|pm|mp)(?![a-z]))"
    r"[ ]?[-+({\[]*(?:[0-9]|\\[a-z]|[b-zB-HJ-Z](?![A-Za-z]))"
    rf"|[ ]?(?:{_FORMULA}|\\(?:alpha|beta|theta|lambda)(?![a-z]))"
)
_EQUATED = re.compile(r"[=({\[$][ ]?-[ ]\Z")  # the sign of "= - 4"
_DASHED = re.compile(r"-[ ]\Z")  # "- 4" may be an entry of a list
_NEGATED = re.compile(r"(?:(?<![\w-])(?i:minus|negative)[ ]|(?<![正胜勝])[负負]|零下)[ ]?\Z")
_BEFORE_MINUS = re.compile(  # which then is an operator, or belongs to another word
    r"(?i:\b(?:[a-z]|plus|or|false|true|one|two|three|four|five|six|seven|eight|nine|ten))[ ]\Z"
)
_CONNECTOR = re.compile(
    r"(?i:[,;、&/~]|\b(?:and|or|to|of|by|per|vs\.?|versus|over|plus|minus|times)|[和或与及到至比跟]|或者|还是)\s{0,4}"
    r"(?:(?:maybe|perhaps|possibly|even|about|也许|可能|是)\s{0,4}){0,2}[\s\"'({\[\\$€£¥]{0,4}\Z"
)
_WORD = re.compile(r"[A-Za-z]{2}|[\u4e00-\u9fff]")
_EQUATES = re.compile(r"=|≈|→|⇒|->|\\(?:approx|to|Rightarrow|implies)")
_UNITS_OF_TWO = (
    r"(?:ft|feet|foot|hours?|hrs?|h|min(?:ute)?s?|m|kg|lbs?|pounds?|dollars?|degrees|°|'|年|小时|米|元|千克|分|度|斤)"
)
_COMPOUND = re.compile(rf"\s{{0,3}}{_UNITS_OF_TWO}\s{{0,3}}\Z")  # as in 5 ft 10
_TOTAL = re.compile(r"\W{0,4}(?:\w{1,12}\s){0,2}(?:in\s(?:total|all)|altogether|total|overall)\b")
_TOTALS = re.compile(r"(?:\b(?:total|sum|so|thus|hence|therefore)\b|共|总|所以|因此)[^0-9]{0,20}\Z")
_LEAD = re.compile(
    r"[\s:(\[\"'`{$]{0,8}(?:(?:about|approximately|roughly|around|exactly|大约|约|=)[\s({\[$]{0,8}){0,2}"
)
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)|[\n。！？]")


@dataclass(frozen=True, slots=True)
class NumberMention:
    """A part of a text that may be a number; `value` is None if it cannot be read as a whole."""

    start: int
    end: int
    value: Fraction | None


def parse_number(text: str) -> Fraction | None:
    r"""Read the exact number that a text settles on; None if there is none, or more than one.

    In this order: the content of \boxed{}; what follows "answer is", 答案是 or ####; the last number of the text. Reads
    integers, decimals (1.5, .5, 1e-3, 3.2 \times 10^5), thousands separators (1,234 and 1,00,000), fractions (3/4, 2
    1/2, \frac{3}{4}), signs, currencies, and words of scale (3 million, 3万). The text around the number is a unit and
    is dropped, also a percent sign: "50%" is 50. A text does not settle on two numbers that are joined ("5 or 6",
    "3-4", "1, 2"), nor on one that is denied ("not 5").
    """
    text = without_retracted(unadorned(text[-_LONGEST_TEXT:]))
    for places in (list(box_places(text)), [place for place in answer_places(text) if place.is_linked]):
        numbers = [(place, _number_at(text[place.start : place.end])) for place in places]
        said = [(place, number.value) for place, number in numbers if number is not None]
        if said:
            return agreed(text, said)
    last = _last(text)
    return None if last is None else last.value


def sure_number(text: str) -> Fraction | None:
    """Read the number of a right answer: as `parse_number` does, but None if there is another number beside it."""
    text = unadorned(text[-_LONGEST_TEXT:])
    place = next(iter([*reversed([*box_places(text)]), *reversed([*answer_places(text)])]), None)
    span = text if place is None else text[place.start : place.end]
    values = {mention.value for mention in _mentions(span)}
    return parse_number(text) if len(values) == 1 else None


def _number_at(span: str) -> NumberMention | None:
    """Read the number that a span begins with, or else the last number of its first sentence that has one."""
    mentions = _mentions(span)
    if not mentions:
        return None
    first, lead = mentions[0], _LEAD.match(span)
    if first.value is not None and lead is not None and first.start <= lead.end():
        both = [*mentions[:2], *mentions[:1]][:2]  # the first again if no other follows
        joined = _are_joined(span[first.end : both[1].start]) and both[1].value != first.value
        return NumberMention(first.start, first.end, None if joined else first.value)
    ends = (found.start() for found in _SENTENCE.finditer(span) if found.start() >= first.end)
    return _last(span[: next(ends, len(span))])


def _last(text: str) -> NumberMention | None:
    """Return the last number of a text, without a value if the text joins it with another."""
    mentions = _mentions(text)
    if not mentions:
        return None
    last = mentions[-1]
    if len(mentions) > 1:
        previous, between = mentions[-2], text[mentions[-2].end : last.start]
        is_formula = previous.value is None and not _WORD.search(between) and not _EQUATES.search(between)
        is_total = _TOTAL.match(text, last.end) or _TOTALS.search(between)
        is_other = previous.value != last.value and not is_total
        if is_formula or between.isspace() or (is_other and _are_joined(between)):
            return NumberMention(last.start, last.end, None)
    return last


def _are_joined(between: str) -> bool:
    """Return whether two numbers are said together, judging by what is between them."""
    if _CONNECTOR.search(between[-40:]) or _COMPOUND.match(between):
        return True
    return not any(letter.isalpha() for letter in between) and _EQUATES.search(between) is None


def _mentions(text: str) -> list[NumberMention]:
    """Find everything that may be a number and is not denied."""
    found: list[NumberMention] = []
    for match in _MENTION.finditer(text):
        before = text[max(0, match.start() - 16) : match.start()]
        is_bare = match["formula"] is None and not before.endswith("$") and text[match.start()] in "-+.0123456789"
        if is_bare and _IN_WORD.search(before) and not _COMMAND.search(before):
            continue
        if found and match.start() == found[-1].end and text[match.start()] == ".":  # a version such as 1.2.3
            continue
        if not is_denied(text, match.start()):
            scale = None if match["formula"] else _SCALE.match(text, match.end())
            end = match.end() if scale is None else scale.end()
            value = None if _OPERATES.match(text, end) else _value(match, before)
            found.append(
                NumberMention(
                    match.start(), end, value if value is None or scale is None else value * _SCALES[scale[1]]
                )
            )
    return found


def _value(match: re.Match[str], before: str) -> Fraction | None:
    """Compute a number from its parts; None if it is part of a formula, too long, or a division by 0."""
    signs = (match["sign"] or "") + (match["late"] or "")
    is_operator = bool(signs) and _AFTER_OPERAND.search(before) is not None
    if match["formula"] or is_operator or len(signs) > 1 or len(match.group()) > _LONGEST or _OPERATED.search(before):
        return None
    if (word := _NEGATED.search(before)) is not None:
        rest = before[: word.start()]
        if signs or _AFTER_OPERAND.search(rest) or _BEFORE_MINUS.search(rest):
            return None
        signs = "-"
    elif _DASHED.search(before):
        if not _EQUATED.search(before):
            return None
        signs = "-"
    if match["mantissa"] is not None:
        value = _with_exponent(match)
    else:
        top = match["top"] or match["tops"] or match["numerator"]
        bottom = _decimal(match["bottom"] or match["bottoms"] or match["denominator"])
        value = None if bottom == 0 else int(match["whole"] or match["mixed"] or 0) + _decimal(top) / bottom
    return None if value is None else -value if signs == "-" else value


def _with_exponent(match: re.Match[str]) -> Fraction | None:
    """Compute a number such as 3, 3e5, 3 x 10^5 or 3^5."""
    mantissa = _decimal(match["mantissa"])
    power = match["ten"] or match["shift"] or match["raised"]
    if power is None:
        return mantissa
    exponent = int("".join(sign for sign in power if sign in "-+0123456789"))
    base, factor = (mantissa, Fraction(1)) if match["raised"] else (Fraction(10), mantissa)
    if abs(exponent) > _LARGEST_EXPONENT or (base == 0 and exponent <= 0):
        return None
    return factor * base**exponent


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub(r"[^0-9.]", "", digits))

"""Unify characters that mean the same: full-width digits and letters, raised digits, signs, spaces."""

import re
import unicodedata

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_RAISED_RUN = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐-⅞↉]")
_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-")
_NARROW_SPACES = dict.fromkeys(map(ord, "\u2009\u202f\u00a0\u2007"), "\u2009")  # these may separate thousands
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS = {ord("\u3000"): " ", ord("\u2044"): "/", ord("￥"): "¥", ord("【"): "[", ord("】"): "]"}
_TABLE: dict[int, str | int] = {**_FULL_WIDTH, **_SIGNS, **_MINUS, **_NARROW_SPACES}

_TAG = re.compile(r"</?[A-Za-z][^<>]{0,80}>")
_EMPHASIS = re.compile(r"(?<![0-9*])(\*{1,3})(?=[^\s*])([^*\n]{1,400})(?<!\s)\1(?!\*)")
_BULLET = re.compile(r"(?m)^[ \t]{0,16}[*•][ \t]{1,16}")
_STYLE = re.compile(
    r"\\(?:textbf|mathbf|text|mathrm|mathit|textit|bm|boldsymbol|mbox|operatorname)[ ]?\{([^{}]{0,400})\}"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[;:!()\[\] ])(?![a-z])|~")


def plain(text: str) -> str:
    """Write digits, letters and signs of other widths as ASCII, raised digits as ^{2}, and fractions as 1/2. Letters of
    other writing systems stay as they are."""
    if text.isascii():
        return text
    text = _VULGAR.sub(_fraction, text)
    text = _RAISED_RUN.sub(lambda found: f"^{{{found.group().translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda found: f"_{{{found.group().translate(_LOWERED)}}}", text)
    return text.translate(_TABLE)


def unadorned(text: str) -> str:
    """Remove what only affects the look of a text: widths of characters, emphasis, bullets, LaTeX's styles and spaces,
    tags."""
    text = _BULLET.sub("", _EMPHASIS.sub(r"\2", _TAG.sub(" ", plain(text))))
    return _LAYOUT.sub(" ", _STYLE.sub(r" \1 ", text))


def _fraction(found: re.Match[str]) -> str:
    before = " " if found.start() and found.string[found.start() - 1].isdigit() else ""  # 2½ becomes 2 1/2
    return before + unicodedata.normalize("NFKC", found.group()).replace("\u2044", "/")

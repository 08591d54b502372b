"""Define the rewards for the shape of a completion: its format, its length, its repetitions. They need no right
answer."""

import math
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from tiercel.config_base import Keys, PositiveInt, Problems, regex_fault, shown
from tiercel.reward_types import Sample
from tiercel.rewards.base import Reward, RewardEntry

TOKENS = "the number of tokens, end token included"
_PART = r"<{tag}>(?:(?!</?{tag}>).)*</{tag}>\s*"
_OPEN_TAG = re.compile(r"<([^/>]+)>\s*\Z")
WORDS_OF_A_REPETITION = 3
LONGEST_WORD = 32  # characters; a longer run without a space is not a word
# Characters of the scripts that put no spaces between words: Thai and Lao, Tibetan, Burmese, Khmer, Japanese, Chinese.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class Format(Reward):
    """1 if it matches `pattern` from end to end (a dot matches line ends too), else 0; default: one
    `<answer>...</answer>`, before it at most one `<think>...</think>`; a `<think>` that the chat template opens counts
    as written by the model"""

    name: Literal["format"] = "format"
    reads: ClassVar[str] = "the whole completion"
    pattern: str | None = None
    """Regular expression the whole completion must match, alone or after what the chat template opened; null asks for
    <answer>...</answer> at the end."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if self.pattern is not None and (fault := regex_fault(self.pattern)) is not None:
            yield Keys("pattern").problem(f"{shown(self.pattern)} is not a regular expression: {fault}")

    def score(self, sample: Sample) -> float:
        tag = open_tag(sample.opened)
        pattern = re.compile(self.pattern or _default_format(tag or "think"), re.DOTALL)
        texts = [sample.opened + sample.completion]
        if self.pattern is not None or tag is None:  # otherwise the completion must close the thought that is open
            texts.append(sample.completion)
        return float(any(map(pattern.fullmatch, texts)))


def open_tag(opened: str) -> str | None:
    """Return the name of the tag that is left open at the end of a text, such as think."""
    found = _OPEN_TAG.search(opened)
    return None if found is None else found[1]


def _default_format(thought: str) -> str:
    """Make the expression for one answer after at most one thought in the tag `thought`."""
    return rf"\s*(?:{_PART.format(tag=thought)})?{_PART.format(tag='answer')}"


class Length(Reward):
    """1 up to `max_tokens`, falling linearly to 0 at twice as many"""

    name: Literal["length"] = "length"
    reads: ClassVar[str] = TOKENS
    max_tokens: PositiveInt
    """The number of tokens up to which it is 1; it falls linearly to 0 at twice as many."""

    def score(self, sample: Sample) -> float:
        return min(1.0, max(0.0, 2.0 - sample.token_count / self.max_tokens))


class Cosine(RewardEntry):
    """a half cosine up to `max_tokens`: from 1 to 0.5 for a right completion, from -0.5 to 0 for a wrong one, by the
    first reward before it in the list that tells right from wrong (Yeo et al. 2025)"""

    name: Literal["cosine"] = "cosine"
    reads: ClassVar[str] = TOKENS
    max_tokens: PositiveInt
    """The number of tokens at which its curve ends, such as rollout.max_new_tokens."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if not any(entry.right_from is not None for entry in before):
            yield Keys("name").problem(
                "is cosine, but there is no reward before it that tells right completions from wrong ones; put one "
                "before it, such as exact, or set correct_at for one"
            )

    def score_after(self, sample: Sample, is_right: bool | None) -> float | None:
        """Return more for a short right completion and less for a short wrong one; None if no reward tells right from
        wrong."""
        if is_right is None:
            return None
        share = min(1.0, sample.token_count / self.max_tokens)
        shortest, longest = (1.0, 0.5) if is_right else (-0.5, 0.0)
        return longest + 0.5 * (shortest - longest) * (1 + math.cos(math.pi * share))


class SoftOverlong(Reward):
    """0 up to `max_tokens` - `buffer`, falling linearly to -1 at `max_tokens` (DAPO 2025)"""

    name: Literal["soft_overlong"] = "soft_overlong"
    reads: ClassVar[str] = TOKENS
    max_tokens: PositiveInt
    """The number of tokens from which on it is -1, such as rollout.max_new_tokens."""
    buffer: PositiveInt
    """The number of tokens before max_tokens over which it falls from 0 to -1."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if self.buffer > self.max_tokens:
            yield Keys("buffer", "max_tokens").problem(
                f"is {self.buffer}, but must be at most max_tokens ({self.max_tokens}), because otherwise even an "
                "empty completion would be penalised"
            )

    def score(self, sample: Sample) -> float:
        over = sample.token_count - (self.max_tokens - self.buffer)
        return -min(1.0, max(0.0, over / self.buffer))


class Repetition(Reward):
    """-(1 - distinct / all) of its runs of `ngram` (3) words: 0 if none comes twice, near -1 if one goes on and
    on; 0 for fewer words. Each character counts as a word in Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan,
    and in what goes on for more than 32 characters without a space"""

    name: Literal["repetition"] = "repetition"
    reads: ClassVar[str] = "the words of the whole completion, in lower case"
    ngram: PositiveInt | None = None
    """Words of the runs that are compared; null takes 3."""

    def score(self, sample: Sample) -> float:
        words = _words(sample.completion.lower())
        size = self.ngram or WORDS_OF_A_REPETITION
        runs: Sequence[tuple[str, ...]] = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        return -(1.0 - len(set(runs)) / len(runs)) if runs else 0.0


def _words(text: str) -> list[str]:
    """Split a text at spaces, and runs that are too long to be words into characters."""
    return [part for word in _WORD.findall(text) for part in ([word] if len(word) <= LONGEST_WORD else word)]


SHAPE = (Format, Length, Cosine, SoftOverlong, Repetition)

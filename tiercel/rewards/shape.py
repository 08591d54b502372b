"""Rewards for the shape of a completion: its format, its length, its repetitions. They need no right answer."""

import math
import re
from collections.abc import Sequence

from tiercel.config.schema import Reward
from tiercel.samples import Sample

_INSIDE = r"(?:(?!</?{tag}>).)*"
DEFAULT_FORMAT = (
    rf"\s*(?:<think>{_INSIDE.format(tag='think')}</think>\s*)?<answer>{_INSIDE.format(tag='answer')}</answer>\s*"
)
WORDS_OF_A_REPETITION = 3


def format_reward(sample: Sample, reward: Reward) -> float:
    """1 where the whole completion matches `pattern` (a dot matches line ends too), else 0.

    Without a pattern: one <answer>...</answer> at the end, before it at most one <think>...</think>.
    """
    return float(re.fullmatch(reward.pattern or DEFAULT_FORMAT, sample.completion, re.DOTALL) is not None)


def length_reward(sample: Sample, reward: Reward) -> float:
    """1 up to `max_tokens` tokens, end token included, falling linearly to 0 at twice as many."""
    assert reward.max_tokens is not None
    return min(1.0, max(0.0, 2.0 - sample.token_count / reward.max_tokens))


def soft_overlong_reward(sample: Sample, reward: Reward) -> float:
    """0 up to `max_tokens` - `buffer` tokens, falling linearly to -1 at `max_tokens`, and -1 beyond (DAPO 2025)."""
    assert reward.max_tokens is not None and reward.buffer is not None
    over = sample.token_count - (reward.max_tokens - reward.buffer)
    return -min(1.0, max(0.0, over / reward.buffer))


def cosine_reward(sample: Sample, is_correct: bool | None, reward: Reward) -> float | None:
    """By a half cosine of the length up to `max_tokens`: from 1 to 0.5 for a right completion, so that short ones are
    worth more, from -0.5 to 0 for a wrong one, so that thinking longer costs less (Yeo et al. 2025). Right and wrong is
    what the first reward before it says that knows; it does not apply where none does."""
    assert reward.max_tokens is not None
    if is_correct is None:
        return None
    share = min(1.0, sample.token_count / reward.max_tokens)
    shortest, longest = (1.0, 0.5) if is_correct else (-0.5, 0.0)
    return longest + 0.5 * (shortest - longest) * (1 + math.cos(math.pi * share))


def repetition_reward(sample: Sample, reward: Reward) -> float:
    """-(1 - distinct / all) of the completion's runs of `ngram` words (3), in lower case: 0 where none comes twice,
    near -1 where one goes on and on; 0 for fewer words."""
    words = sample.completion.lower().split()
    size = reward.ngram or WORDS_OF_A_REPETITION
    runs: Sequence[tuple[str, ...]] = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return -(1.0 - len(set(runs)) / len(runs)) if runs else 0.0

"""A reward that costs nothing and differs between completions, for recipes whose steps are timed."""

from hashlib import sha256

from tiercel.reward_types import Sample


def score(sample: Sample) -> float:
    """Return a value from 0 to 1 that depends only on the completion's text, so that it is the same for any number of
    ranks."""
    return sha256(sample.completion.encode()).digest()[0] / 255

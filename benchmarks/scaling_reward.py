"""A reward that costs nothing and differs between completions, for recipes whose steps are timed."""

from hashlib import sha256

from tiercel.samples import Sample


def score(sample: Sample) -> float:
    """From 0 to 1, by the completion's text alone, so that any number of ranks gives the same."""
    return sha256(sample.completion.encode()).digest()[0] / 255

"""Counts in messages."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, as in "1 row" and "1,024 rows". `plural`: where it is not the noun with an s."""
    return f"{count:,} " + (noun if count == 1 else plural or f"{noun}s")

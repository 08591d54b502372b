"""Numbers for readers: means over windows, smoothing, the sign test, formats. Pure functions."""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
Point = tuple[int, float]  # step, value

NOTHING = "\u2013"  # stands where there is no number
TIMES = "\u00d7"
WINDOW = 20  # steps at either end of a run that are averaged


def ends(points: Sequence[Point]) -> tuple[float, float, int]:
    """Return the means of the first and of the last k values, and k. The two ends never overlap, unless there is a
    single point. `points` holds at least one."""
    size = max(1, min(WINDOW, len(points) // 2))
    values = [value for _, value in points]
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:]), size


def trailing_means(points: Sequence[Point], size: int) -> list[Point]:
    """Replace each value by the mean of itself and up to `size` - 1 values before it."""
    sums = list(accumulate((value for _, value in points), initial=0.0))
    smoothed = []
    for end, (step, _) in enumerate(points, start=1):
        start = max(0, end - size)
        smoothed.append((step, (sums[end] - sums[start]) / (end - start)))
    return smoothed


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about `most` points that look the same when drawn: the first, the last, and the smallest and the
    largest of each stretch."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most / 2))
    kept: set[Point] = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, with the first and the last."""
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return list(items[:most])
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided p-value of `gained` against `lost` if both are equally likely (exact McNemar test)."""
    count, fewer = gained + lost, min(gained, lost)
    log_terms = (
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) - count * math.log(2)
        for k in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, log_terms)))


def short(value: float) -> str:
    """Format a number in about four characters, with a true minus sign: 0, 0.312, 1.25, 12.3, 1,024, 12.3k, 2e-05."""
    size = abs(value)
    if size >= 1e12:
        text = f"{size:.1e}"
    elif size >= 1e4:
        factor, unit = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= pair[0])
        text = f"{size / factor:.3g}{unit}"
    elif size >= 100:
        text = f"{size:,.0f}"
    elif size >= 0.01:
        text = f"{size:.1f}" if size >= 10 else f"{size:.2f}" if size >= 1 else f"{size:.3f}"
    else:
        text = f"{size:.2g}"
    return f"\u2212{text}" if value < 0 else text


def pair(before: float, after: float) -> tuple[str, str]:
    """Format two numbers with the smallest number of decimals, from 2 to 4, that distinguishes them."""
    most = 2 if before == after else 4
    decimals = next((digits for digits in (2, 3) if f"{before:.{digits}f}" != f"{after:.{digits}f}"), most)
    return f"{before:.{decimals}f}", f"{after:.{decimals}f}"


def share(value: float) -> str:
    """Format a fraction as a percentage."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %" if percent >= 0.1 else "< 0.1 %"


def duration(seconds: float) -> str:
    """Format a time, as in "42 s", "7 min 30 s" and "3 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"

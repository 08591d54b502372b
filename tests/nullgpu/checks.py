"""What the log of a run must show, by the name of the check."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tests.nullgpu.log import Entry, Log

TOKEN, PREFILL = "token", "prefill"  # marks that a run sets in the log


def summary(log: Log) -> dict[str, Any]:
    """Return what the checks read, as JSON."""
    after_loading = _after(log.entries, PREFILL)
    return {
        "graphs": sum(entry.name == "begin" for entry in log.of("graph")),
        "replays": sum(entry.name == "launch" for entry in log.of("graph")),
        "token_nodes": max((entry.numbers[1] for entry in log.of("graph") if entry.name == "launch"), default=0),
        "step_launches": sum(entry.kind in {"launch", "gemm"} for entry in _after(log.entries, PREFILL, last=True)),
        "broken": [entry.name for entry in log.entries if entry.broke_capture],
        "refused": log.refused,
        "nvrtc": sum("nvrtc" in entry.name for entry in log.of("module")),
        "waits_between_tokens": [
            entry.name for part in _between_tokens(log.entries) for entry in part if entry.kind == "sync"
        ],
        "pageable": sum(
            entry.kind == "copy" and entry.name == "h2d pageable"
            for part in _parts(after_loading)
            if not _captures(part) and not _compiles(part)  # there the compiler tries its kernels
            for entry in part
        ),
        "allocated_in_capture": sum(entry.numbers[0] for entry in _captured(log.entries) if entry.kind == "malloc"),
    }


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "no capture is broken": lambda found: not found["broken"],
    "no launch is refused": lambda found: not found["refused"],
    "nothing is compiled by NVRTC": lambda found: found["nvrtc"] == 0,
    "the stream is that of before": lambda found: found["default_stream"],
    "tokens are drawn without a wait": lambda found: not found["waits_between_tokens"],
    "copies come from pinned memory": lambda found: found["pageable"] == 0,
    "a capture allocates little": lambda found: found["allocated_in_capture"] <= 2**26,
}


def failed(found: Mapping[str, Any]) -> list[str]:
    """Return the names of the checks that a run does not pass."""
    return [name for name, holds in CHECKS.items() if not holds(found)]


def _after(entries: Sequence[Entry], mark: str, *, last: bool = False) -> Sequence[Entry]:
    """Return what follows the first or the last mark of this name."""
    places = [number for number, entry in enumerate(entries) if entry.kind == "mark" and entry.name == mark]
    return entries[places[-1 if last else 0] :] if places else []


def _compiles(part: Sequence[Entry]) -> bool:
    return any(entry.kind == "module" and entry.name.startswith("triton") for entry in part)


def _parts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the calls from each mark to the next."""
    marks = [number for number, entry in enumerate(entries) if entry.kind == "mark"]
    return (entries[start:stop] for start, stop in pairwise([*marks, len(entries)]))


def _captures(part: Sequence[Entry]) -> bool:
    return any(entry.kind == "graph" and entry.name == "begin" for entry in part)


def _between_tokens(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the calls from each token of a batch to its next, except those in which a graph was captured."""
    for part, following in pairwise(_parts(entries)):
        if part[0].name == following[0].name == TOKEN and not _captures(part):
            yield part


def _captured(entries: Sequence[Entry]) -> Iterator[Entry]:
    is_captured = False
    for entry in entries:
        if entry.kind == "graph" and entry.name in {"begin", "end"}:
            is_captured = entry.name == "begin"
        elif is_captured:
            yield entry

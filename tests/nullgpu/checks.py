"""What the log of a run must show, by the name of the check."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tests.nullgpu.log import Entry, Log

# Marks that a run sets in the log. A look waits for the device, to see which rows have ended.
TOKEN, PREFILL, LOOK, TRANSFORMERS, DONE = "token", "prefill", "look", "transformers", "done"


def summary(log: Log) -> dict[str, Any]:
    """Return what the checks read, as JSON."""
    after_loading = _after(log.entries, PREFILL)
    parts = [part for part in _parts(after_loading) if not _captures(part) and not _compiles(part)]
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
        "looks": sum(entry.kind == "mark" and entry.name == LOOK for entry in log.entries),
        "pageable": sum(_pageable(part) for part in parts if part[0].name != TRANSFORMERS),
        "pageable_in_transformers": sum(_pageable(part) for part in parts if part[0].name == TRANSFORMERS),
        "allocated_in_capture": max(
            (sum(entry.numbers[0] for entry in part if entry.kind == "malloc") for part in _captured(log.entries)),
            default=0,
        ),
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


def _pageable(part: Sequence[Entry]) -> int:
    return sum(entry.kind == "copy" and entry.name == "h2d pageable" for entry in part)


def _compiles(part: Sequence[Entry]) -> bool:
    """Return whether kernels of Triton are loaded in it: the compiler tries them with numbers of its own."""
    return any(entry.kind == "module" and entry.name.startswith("triton") for entry in part)


def _parts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the calls from each mark to the next."""
    marks = [number for number, entry in enumerate(entries) if entry.kind == "mark"]
    return (entries[start:stop] for start, stop in pairwise([*marks, len(entries)]))


def _captures(part: Sequence[Entry]) -> bool:
    return any(entry.kind == "graph" and entry.name == "begin" for entry in part)


def _between_tokens(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the calls from each token of a batch to its next or to a look, except those in which a graph was
    captured."""
    for part, following in pairwise(_parts(entries)):
        if part[0].name == TOKEN and following[0].name in {TOKEN, LOOK} and not _captures(part):
            yield part


def _captured(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the calls of each capture."""
    begin = 0
    for number, entry in enumerate(entries):
        if entry.kind == "graph" and entry.name == "begin":
            begin = number + 1
        elif entry.kind == "graph" and entry.name == "end":
            yield entries[begin:number]

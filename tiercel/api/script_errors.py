"""What a script prints if one of tiercel's errors ends it: its own lines and the message, without tiercel's frames."""

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from tiercel.errors import TiercelError
from tiercel.messages import translated
from tiercel.reliability.redaction import redact

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
OWN = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def shorten_errors() -> None:
    """Print tiercel's errors in short from now on. Every other error, and one with a cause in the user's own code, is
    printed whole by the hook that was there before."""
    before: Hook = sys.excepthook

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TiercelError) or any(map(_is_users, _frames_of_causes(error))):
            before(kind, error, trace)
            return
        frames = traceback.extract_tb(trace)
        calling = list(takewhile(lambda frame: not frame.filename.startswith(OWN), frames))
        kept = [*calling, *filter(_is_users, frames[len(calling) :])]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)]
        print(f"{redact(''.join(lines))}{kind.__name__}: {translated(redact(str(error)))}", file=sys.stderr)

    sys.excepthook = print_error


def _frames_of_causes(error: BaseException) -> Iterator[traceback.FrameSummary]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from traceback.extract_tb(cause.__traceback__)
        yield from _frames_of_causes(cause)


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((OWN, *LIBRARIES, "<frozen "))

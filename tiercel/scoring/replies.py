"""What comes from a process of the user's code: one line of JSON, which that code may have written itself.

It is limited before it is parsed, and is without secrets from here on: what a tool, an environment or a reward answers
becomes tokens, and is kept in files.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tiercel.reliability.redaction import redact_answers

MOST_NODES = 100_000  # brackets and commas outside texts
DEEPEST = 64  # a tool's schema has fewer than 20
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_OTHER = re.compile(rb"[^][{}]+")
FOREIGN_REPLY = "something other than its answers came over its connection; its process was killed"


class ForeignReply(ValueError):
    """What came over the connection is no reply: the user's code wrote to it. The message is what to say of it."""

    def __init__(self, message: str = FOREIGN_REPLY):
        super().__init__(message)


def read_reply(line: bytes | bytearray) -> Mapping[str, Any]:
    """Read a line. Raises ForeignReply."""
    _require_small(_TEXT.sub(b"", line))
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ForeignReply from error
    if not isinstance(reply, dict):
        raise ForeignReply
    redacted: dict[str, Any] = redact_answers(reply)
    return redacted


def _require_small(signs: bytes) -> None:
    """Raise ForeignReply if what is left of a line without its texts is large or deep."""
    nodes = sum(map(signs.count, (b"[", b"{", b",")))
    if nodes > MOST_NODES:
        raise ForeignReply(
            f"{nodes:,} values came in one answer, at most {MOST_NODES:,} are taken; its process was killed"
        )
    depth = 0
    for bracket in _OTHER.sub(b"", signs):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ForeignReply(f"an answer came that is nested more than {DEEPEST} deep; its process was killed")

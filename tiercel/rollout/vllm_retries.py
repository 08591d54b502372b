"""How often a failing server is asked again, and after which pauses."""

import time
from dataclasses import dataclass

from tiercel.rollout.vllm_http import Nonsense, ServerFault

BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
NONSENSE = 3  # invalid answers, with a pause after each, before a server is not used any more


@dataclass(kw_only=True, slots=True)
class Faults:
    """Counts what went wrong with a server, or with a request."""

    in_a_row: int = 0
    nonsense: int = 0  # invalid answers that are not forgotten
    first: float | None = None  # time.monotonic() of the first one; None before it

    @property
    def are_too_wrong(self) -> bool:
        return self.nonsense >= NONSENSE

    def add(self, fault: ServerFault) -> float:
        """Count a fault. Return the seconds to wait before another attempt."""
        pause = BACKOFF_SECONDS[min(self.in_a_row, len(BACKOFF_SECONDS) - 1)]
        self.in_a_row += 1
        self.nonsense += isinstance(fault, Nonsense)
        if self.first is None:
            self.first = time.monotonic()
        return pause

    def lasted(self, seconds: float) -> bool:
        """Tell whether the first fault is as long ago."""
        return self.first is not None and time.monotonic() - self.first >= seconds

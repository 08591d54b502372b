"""The user's own reward function, run in a process of its own. See worker.py for what the function may be."""

from collections.abc import Sequence

from tiercel.errors import RecipeError
from tiercel.reliability.redaction import Redactor
from tiercel.rewards.process import RewardProcess
from tiercel.rewards.wire import NotJson, encode_sample
from tiercel.samples import RewardValue, Sample

START_TIMEOUT = 120.0  # seconds to import the user's code, whatever large packages it needs


class UserReward:
    """One function of the user's, called for a batch of samples at a time.

    A completion whose call raises, hangs, ends the process or answers anything but a finite number or None is
    unscorable, and its failure says why. The process is killed after a hang and started afresh for the next batch.
    """

    def __init__(self, call: str, *, timeout: float):
        """`call` is file.py:function or package.module:function, `timeout` the seconds that one batch may take."""
        self.call = call
        self._timeout = timeout
        self._process: RewardProcess | None = None

    def start(self) -> None:
        """Import the user's code. Raises RecipeError with the reason where that fails."""
        problem = self._start()
        if problem is not None:
            raise RecipeError([problem])

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        """A value for each sample, in order."""
        values: dict[int, RewardValue] = {}
        lines: dict[int, str] = {}
        for index, sample in enumerate(samples):
            try:
                lines[index] = encode_sample(sample)
            except NotJson as error:
                values[index] = RewardValue(value=None, failure=f"reward {self.call}: {error}")
        if lines:
            values |= self._ask(samples, lines)
        return tuple(values[index] for index in range(len(samples)))

    def close(self) -> None:
        """Kill the process, where there is one, and all that it started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> str | None:
        """Start the process; the reason where the user's code cannot be loaded."""
        self.close()
        process = RewardProcess(self.call)
        self._process = process
        loaded = process.exchange(b"", reply_count=1, timeout=START_TIMEOUT)
        problem = loaded.interruption if loaded.interruption is not None else loaded.replies[0]["problem"]
        if problem is None:
            return None
        text = f"{self.call}: {problem}" + _printed(process)
        self.close()
        return text

    def _ask(self, samples: Sequence[Sample], lines: dict[int, str]) -> dict[int, RewardValue]:
        """Values of the samples whose lines are given, by index."""
        if self._process is None or not self._process.is_alive:
            problem = self._start()
            if problem is not None:
                return {index: RewardValue(value=None, failure=f"reward {problem}") for index in lines}
        process = self._process
        assert process is not None
        process.printed()  # what came before this batch
        request = f"[{','.join(lines.values())}]\n".encode()
        is_reusable = False
        try:
            exchange = process.exchange(request, reply_count=len(lines), timeout=self._timeout)
            printed = _printed(process)
            is_reusable = exchange.interruption is None
        finally:  # a signal may arrive here: answers still on their way must not meet the next batch
            if not is_reusable:
                self.close()
        replies = {reply["index"]: reply for reply in exchange.replies}
        values: dict[int, RewardValue] = {}
        for position, index in enumerate(lines):
            reply = replies.get(position, {"failure": exchange.interruption})
            failure = reply.get("failure")
            if failure is not None:
                failure = f"reward {self.call}, row {samples[index].id}: {failure}{printed}"
                failure = _without_columns_secrets(failure, samples[index])
            values[index] = RewardValue(value=reply.get("value"), failure=failure)
        return values


def _without_columns_secrets(failure: str, sample: Sample) -> str:
    """A column named like a secret holds one as a variable does."""
    texts = {name: value for name, value in sample.columns.items() if isinstance(value, str)}
    return Redactor(texts).redact(failure)


def _printed(process: RewardProcess) -> str:
    lines = process.printed()
    return "\n".join(["", "it printed:", *(f"  {line}" for line in lines)]) if lines else ""

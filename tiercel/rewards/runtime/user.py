"""The user's own reward function, run in a process of its own. See worker.py for what the function may be."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.reliability.redaction import Redactor
from tiercel.rewards.runtime.wire import LARGEST_VALUE, NotJson, encode_sample
from tiercel.samples import RewardValue, Sample
from tiercel.sandbox.process import FOREIGN_REPLY, ExchangeResult, ProcessJob, UserProcess, in_words
from tiercel.wording import counted

WORKER = "tiercel.rewards.runtime.worker:run"
MOST_HEARD = 1000  # lines of a reward in a run's log, of each start


class UserReward:
    """One function of the user's, called for a batch of samples at a time.

    A completion whose call raises, hangs, ends the process, takes more than its limits allow or answers anything but
    a finite number or None is unscorable, and its failure says why. The process is killed after a hang and started
    afresh for the next batch. One that ends between two batches is replaced, and nothing fails.
    """

    def __init__(self, call: str, limits: Reliability, *, variables: Collection[str] = ()):
        """`call` is file.py:function or package.module:function. `variables` of the environment are seen by it though
        they look like secrets."""
        self.call = call
        self._limits = limits
        self._variables = tuple(variables)
        self._process: UserProcess | None = None
        self.hear: Callable[[str], None] | None = None  # is told what the user's code prints
        self._heard = 0

    def start(self) -> None:
        """Import the user's code. Raises RecipeError with the reason where that fails."""
        problem = self._start()
        if problem is not None:
            raise RecipeError([problem])

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        """Return a value for each sample, in order."""
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
        """Start the process; return the reason where the user's code cannot be loaded."""
        self.close()
        job = ProcessJob(name=f"the reward {self.call}", entry=WORKER, work=self.call)
        self._process = UserProcess(job, self._limits, self._variables)
        problem = self._process.load()
        if problem is None:
            return None
        self.close()
        return f"{self.call}: {problem}"

    def _ask(self, samples: Sequence[Sample], lines: dict[int, str]) -> dict[int, RewardValue]:
        """Return the values of the samples whose lines are given, by index."""
        request = f"[{','.join(lines.values())}]\n".encode()
        for _ in range(2):
            problem = None if self._process is not None and self._process.is_alive else self._start()
            if problem is not None:
                return {index: RewardValue(value=None, failure=f"reward {problem}") for index in lines}
            exchange, printed = self._exchange(request, len(lines), samples)
            if exchange.replies or not exchange.has_ended:
                break  # else it had ended before this batch, and nothing of it was begun
        replies = {reply.get("index"): reply for reply in exchange.replies[1:] if isinstance(reply.get("index"), int)}
        values: dict[int, RewardValue] = {}
        for position, index in enumerate(lines):
            value, failure = checked_reply(replies.get(position, {"failure": exchange.interruption}))
            if failure is not None:
                failure = f"reward {self.call}, row {samples[index].id}: {failure}{printed}"
                failure = without_secrets_of(samples[index].columns, failure)
            values[index] = RewardValue(value=value, failure=failure)
        return values

    def _exchange(self, request: bytes, sample_count: int, samples: Sequence[Sample]) -> tuple[ExchangeResult, str]:
        """Ask for a batch: a sign that it has begun and a reply for each sample; and return what was printed."""
        process = self._process
        assert process is not None
        self._pass_on(process.printed(), process.passed_over, ())  # what came before this batch
        is_reusable = False
        try:
            exchange = process.exchange(request, reply_count=sample_count + 1, timeout=self._limits.reward_timeout)
            lines = process.printed()
            self._pass_on(lines, process.passed_over, samples)
            printed = in_words(lines)
            answered = sorted(str(reply.get("index")) for reply in exchange.replies[1:])
            is_reusable = answered == sorted(map(str, range(sample_count)))
        finally:  # a signal may arrive here: answers still on their way must not meet the next batch
            if not is_reusable:
                self.close()
        return exchange, printed

    def _pass_on(self, lines: Sequence[str], passed_over: int, samples: Sequence[Sample]) -> None:
        """Tell the last lines that the user's code printed, and how many more there were, as long as they are few."""
        if self.hear is None or not lines or self._heard >= MOST_HEARD:
            return
        text = "\n".join(lines)
        for sample in samples:
            text = without_secrets_of(sample.columns, text)
        more = f" ({counted(passed_over, 'line')} before these)" if passed_over else ""
        self.hear(f"{self.call} printed{more}:\n  " + text.replace("\n", "\n  "))
        self._heard += len(lines)
        if self._heard >= MOST_HEARD:
            self.hear(f"{self.call}: its further output is left out of this log")


def checked_reply(reply: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """Return value and failure of a reply. The user's code may have written what looks like one."""
    if "value" in reply and reply["value"] is None:
        return None, None
    value, failure = reply.get("value"), reply.get("failure", FOREIGN_REPLY)
    if isinstance(value, float) and abs(value) <= LARGEST_VALUE:
        return value, None
    return None, failure if isinstance(failure, str) else FOREIGN_REPLY


def without_secrets_of(columns: Mapping[str, Any], failure: str) -> str:
    """Redact values of columns named like a secret, as those of variables are."""
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    return Redactor(texts).redact(failure)

"""Run a reward function of the user in its own process. worker.py says what the function may be."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.message_text import counted
from tiercel.reliability.redaction import Redactor
from tiercel.reward_types import RewardValue, Sample
from tiercel.rewards.runtime.signature_adapters import NO_ARGUMENTS
from tiercel.rewards.runtime.wire import LARGEST_VALUE, NotJson, encode_sample
from tiercel.sandbox.process import FOREIGN_REPLY, ExchangeResult, ProcessJob, UserProcess, in_words

WORKER = "tiercel.rewards.runtime.worker:run"
MOST_LOGGED = 1000  # lines of a reward that the log of a run takes, for each start of the run


class UserReward:
    """One function of the user, called for a batch of samples at a time.

    A completion is unscorable if its call raises, hangs, ends the process, exceeds its limits, or returns anything but
    a finite number or None; its failure says why. After a hang the process is killed, and a new one is started for the
    next batch. A process that ends between two batches is replaced without any failure.
    """

    def __init__(
        self,
        call: str,
        limits: Reliability,
        *,
        variables: Collection[str] = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ):
        """Prepare to call the function that `call` names, as file.py:function or package.module:function, with further
        `arguments`. It sees `variables` of the environment although they look like secrets."""
        self.call = call
        self._arguments = dict(arguments)
        self._limits = limits
        self._variables = tuple(variables)
        self._process: UserProcess | None = None
        self._logged = 0  # lines

    def start(self) -> None:
        """Import the user's code. Raises RecipeError with the reason if that fails."""
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
        """Kill the process, if there is one, and everything that it started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> str | None:
        """Start the process; return the reason if the user's code cannot be loaded."""
        self.close()
        job = ProcessJob(
            name=f"the reward {self.call}", entry=WORKER, work={"call": self.call, "arguments": self._arguments}
        )
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
                break  # otherwise it had ended before this batch, and had not begun it
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
        """Ask for a batch: a sign that it has begun, and a reply for each sample. Also return what was printed."""
        process = self._process
        assert process is not None
        self._pass_on(process.printed(), process.passed_over, ())  # what was printed before this batch
        is_reusable = False
        try:
            exchange = process.exchange(request, reply_count=sample_count + 1, timeout=self._limits.reward_timeout)
            lines = process.printed()
            self._pass_on(lines, process.passed_over, samples)
            printed = in_words(lines)
            answered = sorted(str(reply.get("index")) for reply in exchange.replies[1:])
            is_reusable = answered == sorted(map(str, range(sample_count)))
        finally:  # a signal may arrive here: answers still on their way must not be taken for those of the next batch
            if not is_reusable:
                self.close()
        return exchange, printed

    def _pass_on(self, lines: Sequence[str], passed_over: int, samples: Sequence[Sample]) -> None:
        """Pass on the last lines that the user's code printed, and how many came before them, until MOST_LOGGED is
        reached."""
        if not logger.isEnabledFor(logging.DEBUG) or not lines or self._logged >= MOST_LOGGED:
            return
        text = "\n".join(lines)
        for sample in samples:
            text = without_secrets_of(sample.columns, text)
        more = f" ({counted(passed_over, 'line')} before these)" if passed_over else ""
        logger.debug(f"{self.call} printed{more}:\n  " + text.replace("\n", "\n  "))
        self._logged += len(lines)
        if self._logged >= MOST_LOGGED:
            logger.debug(f"{self.call}: its further output is left out of this log")


def checked_reply(reply: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """Return the value and the failure of a reply. The user's code may have written something that looks like a
    reply."""
    if "value" in reply and reply["value"] is None:
        return None, None
    value, failure = reply.get("value"), reply.get("failure", FOREIGN_REPLY)
    if isinstance(value, float) and abs(value) <= LARGEST_VALUE:
        return value, None
    return None, failure if isinstance(failure, str) else FOREIGN_REPLY


def without_secrets_of(columns: Mapping[str, Any], failure: str) -> str:
    """Redact the values of columns whose names look like secrets, as those of variables are redacted."""
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    return Redactor(texts).redact(failure)

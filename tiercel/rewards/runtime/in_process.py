"""Call rewards in the trainer's own process: functions of a Python session that cannot be in a file, such as a method
of an object that has loaded a model. They have no limit of memory, and exceeding the limit of time only makes a
warning."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.reward_types import RewardValue, Sample
from tiercel.rewards.runtime.signature_adapters import NO_ARGUMENTS, NoReward, as_reward
from tiercel.rewards.runtime.user import checked_reply
from tiercel.rewards.runtime.worker import score_batch

PREFIX = f"{__name__}.run_"
_FUNCTIONS: dict[str, Any] = {}  # functions of this process, by the text that names them in a recipe


def register_function(function: Any, name: str, run: Path) -> str:
    """Remember a function, and return the text that names it in the recipe of a run, which other runs do not use."""
    word = name if name.isidentifier() else "function"
    call = f"{PREFIX}{sha256(os.path.abspath(run).encode()).hexdigest()[:8]}:{word}"
    _FUNCTIONS[call] = function
    return call


class InProcessReward:
    """One function of this process, called for a batch of samples at a time, in its own thread."""

    def __init__(self, call: str, limits: Reliability, arguments: Mapping[str, Any] = NO_ARGUMENTS):
        self.call = call
        self._arguments = arguments
        self._name = call.rpartition(":")[2]
        self._seconds = limits.reward_timeout
        self._thread: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # one for the run, so that clients may keep connections
        self._function: Any = None

    def start(self) -> None:
        """Find the function. Raises RecipeError if this process was not given it, or if it is not a reward."""
        if self.call not in _FUNCTIONS:
            remedy = "pass it again, or write it to a file"
            raise RecipeError([f"{self._name} was a function of a Python session that has ended; {remedy}"])
        try:
            self._function = as_reward(_FUNCTIONS[self.call], self._arguments)
        except NoReward as error:
            raise RecipeError([f"{self._name} {error}"]) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._loop = asyncio.new_event_loop()

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        """Return a value for each sample, in order."""
        assert self._thread is not None and self._loop is not None
        replies: dict[int, Mapping[str, Any]] = {}
        work = self._thread.submit(score_batch, self._function, samples, self._loop, replies.__setitem__)
        while True:
            try:
                work.result(self._seconds)
                break
            except TimeoutError:
                logger.warning(f"{self._name} has taken more than {self._seconds:g} s, and is waited for")
        made = [checked_reply(replies[place]) for place in range(len(samples))]
        return tuple(
            RewardValue(value=value, failure=failure and f"reward {self._name}, row {sample.id}: {failure}")
            for sample, (value, failure) in zip(samples, made, strict=True)
        )

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None

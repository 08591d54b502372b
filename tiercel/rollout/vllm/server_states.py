"""Which vLLM servers get requests. A server that fails gets none for some time; before it gets requests again, it is
checked and gets the policy."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from tiercel.errors import TrainingError
from tiercel.log import logger
from tiercel.rollout.vllm.http import NONSENSE, InvalidAnswer, ServerFault, ServerFaults, VllmServer
from tiercel.types import EncodedPrompt

POLL_SECONDS = 0.05
FORGIVEN = 1000  # good answers after which earlier invalid ones are forgotten


@dataclass(kw_only=True, slots=True)
class ServerState:
    """A server and its state, as this rank knows it."""

    server: VllmServer
    faults: ServerFaults
    base: str = ""  # name of the server's own model
    in_flight: int = 0  # requests without an answer yet
    fault: str | None = None  # why it gets no requests; None: it does
    last_fault: str | None = None  # the same, kept after the server is back
    good: int = 0  # good answers since the last invalid one
    next_try: float = 0.0  # time.monotonic() from which it is tried again
    is_tried: bool = False  # a task is trying it now

    def count_good_answer(self) -> None:
        """Count an answer, and forgive earlier faults after many of them."""
        self.faults.in_a_row = 0
        self.good += 1
        if self.good >= FORGIVEN:
            self.faults.nonsense = 0


Restore = Callable[[ServerState], Coroutine[Any, Any, str]]  # checks a server and loads the policy; returns its name


class ServerStates:
    """The servers of a pool. The states are changed only in the event loop of the sampler."""

    def __init__(self, servers: Iterable[VllmServer], patience_seconds: float):
        self.every = [ServerState(server=server, faults=ServerFaults()) for server in servers]
        self.patience_seconds = patience_seconds
        self._last_sign = time.monotonic()  # of the servers: an answer, or a fault after which none was left

    @property
    def good(self) -> list[ServerState]:
        """Return the servers that get requests."""
        return [state for state in self.every if state.fault is None]

    @property
    def faults(self) -> dict[str, str]:
        """Return the reason for each server that gets no requests, by its address."""
        return {state.server.url: state.fault for state in self.every if state.fault is not None}

    def note_sign(self) -> None:
        """Count the patience from now."""
        self._last_sign = time.monotonic()

    async def pick(self, prompt: EncodedPrompt, first_fault: float | None, restore: Restore) -> ServerState:
        """Choose the server with the fewest requests. A server whose pause is over is tried first. Raises TrainingError
        if no server has answered for longer than the patience, if this prompt has failed for longer, or if no server is
        used any more."""
        while True:
            if all(state.faults.are_too_wrong for state in self.every):
                raise TrainingError(self._useless())
            now = time.monotonic()
            since = self._last_sign if first_fault is None else first_fault
            if now - since > self.patience_seconds and (first_fault is not None or not self.good):
                raise TrainingError(self._lost(prompt))
            due = next((s for s in self.every if s.fault and not s.is_tried and s.next_try <= now), None)
            if due is not None:
                await self._try_again(due, restore)
                continue
            if good := self.good:
                return min(good, key=lambda each: each.in_flight)
            await asyncio.sleep(POLL_SECONDS)

    async def on_good(self, work: Callable[[ServerState], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for all servers that get requests, at the same time. A server that fails gets none for some
        time."""

        async def on(state: ServerState) -> None:
            try:
                await work(state)
            except ServerFault as fault:
                self.leave(state, fault)

        await asyncio.gather(*(on(state) for state in self.good))

    def leave(self, state: ServerState, fault: ServerFault) -> None:
        """Send no requests to a server for some time, or never again if it has given too many invalid answers."""
        is_news = state.fault is None
        state.fault = state.last_fault = str(fault)
        if is_news or state.is_tried:  # if many requests fail together, only the first is counted
            state.next_try = time.monotonic() + state.faults.add(fault)
            if isinstance(fault, InvalidAnswer):
                state.good = 0
        if state.faults.are_too_wrong and state.next_try != math.inf:
            state.next_try = math.inf
            logger.warning(f"{state.server.url} is not used any more: {NONSENSE} invalid answers, the last: {fault}")
        elif is_news:
            if not self.good:
                self.note_sign()  # the answers of tools may have taken long before
            logger.warning(f"{state.server.url} failed ({fault}); its prompts are tried again")

    async def _try_again(self, state: ServerState, restore: Restore) -> None:
        """Restore a server that had failed. If that succeeds, it gets requests again."""
        state.is_tried = True
        try:
            if not await state.server.is_healthy():
                raise ServerFault(state.fault or "it does not answer /health")
            name = await restore(state)
        except ServerFault as fault:
            self.leave(state, fault)
        else:
            state.fault = None
            logger.info(f"{state.server.url} is back, with {name}")
        finally:
            state.is_tried = False

    def _lost(self, prompt: EncodedPrompt) -> str:
        return (
            f"rollout.urls: row {prompt.row.id} got no answer within rollout.patience "
            f"({self.patience_seconds:g} s): {self._reasons()}; start the servers again, and run the "
            "same command again to resume from the newest checkpoint"
        )

    def _useless(self) -> str:
        return (
            f"rollout.urls: every server has given {NONSENSE} invalid answers: {self._reasons()}; none of them "
            "was trained on; look into the server's log, start it again or update vLLM, and run the same command "
            "again to resume from the newest checkpoint"
        )

    def _reasons(self) -> str:
        return "; ".join(f"{state.server.url}: {state.last_fault}" for state in self.every if state.last_fault)

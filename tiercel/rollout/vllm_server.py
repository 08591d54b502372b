"""The `vllm-server` engine: completions by any number of unpatched vLLM servers.

A prompt is one request, whose answer counts once or not at all. A server that fails is left alone for a while, and gets
the adapter again before it gets requests; its prompts go to the others.
"""

import asyncio
import base64
import io
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.http_json import brief
from tiercel.models.family import Family
from tiercel.models.images import picture_image
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.vllm_common import (
    ROUNDING,
    Impossible,
    make_completion,
    require_same_prompt,
    sampling_fields,
)
from tiercel.rollout.vllm_http import (
    CHAT,
    SHORT_ANSWER,
    AdapterMissing,
    Nonsense,
    ServerFault,
    VllmServer,
    servers_key,
)
from tiercel.rollout.vllm_protocol import ChatAnswer, Choice
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Group, Message

REQUESTS_IN_FLIGHT = 64  # of one rank, over all servers
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
POLL_SECONDS = 0.05
NONSENSE = 3  # invalid answers, each after a while of its own, before a server is left out for good
FORGIVEN = 1000  # good answers after which earlier invalid ones no longer count
SCORED_ID = "token_id:"  # before an id, in vLLM's answers
BYTES_PER_TOKEN = 1024  # that an answer may take; vLLM takes about 150
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """What to sample from."""

    version: int
    name: str
    directory: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a server must have been started with."""

    model_names: tuple[str, ...]  # by which it may call the recipe's model; what counts is the last part
    row_tokens: int


@dataclass(kw_only=True, slots=True)
class _Seat:
    """A server, and what this rank knows of it."""

    server: VllmServer
    in_flight: int = 0
    fault: str | None = None  # why it is left alone
    last_fault: str | None = None  # why it was, though it may be back
    faults: int = 0  # in a row
    nonsense: int = 0  # invalid answers since it was last forgiven
    good: int = 0  # answers since the last invalid one
    next_try: float = 0.0
    is_tried: bool = False  # someone is finding out whether it is back

    @property
    def is_out(self) -> bool:
        return self.nonsense >= NONSENSE


class ServerSampler:
    """Spreads prompts over servers by load. Raises TrainingError when none has answered for `patience_seconds`.

    All talk with servers is on one event loop, in a thread of its own; only there do seats change.
    """

    shares_weights = False

    def __init__(
        self,
        family: Family,
        servers: Sequence[VllmServer],
        needs: Needs,
        *,
        patience_seconds: float,
        ranks: Ranks = ALONE,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.family = family
        self.seats = [_Seat(server=server) for server in servers]
        self.needs = needs
        self.patience_seconds = patience_seconds
        self.ranks = ranks
        self.say = say
        self.policy: LoadedPolicy | None = None
        self._last_answer = time.monotonic()
        self._probe: EncodedPrompt | None = None  # what a server that is back is asked first
        self._retries = 0  # prompts that were asked for again
        self._loop = asyncio.new_event_loop()
        # A daemon: whatever a server does, it does not keep the process from ending.
        threading.Thread(target=self._loop.run_forever, name="tiercel-vllm-servers", daemon=True).start()

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Leave the servers as they were found."""
        if self.policy is not None and self.ranks.is_first:
            self._run(self._unload(self.policy.name))
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        """Every server that answers gets the version; one that does not gets it when it is back."""
        assert adapter_directory is not None
        before = self.policy
        directory = adapter_directory.absolute()
        self.policy = LoadedPolicy(version=version, name=directory.name, directory=directory)
        if before is not None and before.name == self.policy.name:
            return
        self.ranks.on_first(
            lambda: self._run(self._on_good_seats(lambda seat: seat.server.load(directory.name, directory)))
        )
        if before is not None:
            self.ranks.on_first(lambda: self._run(self._unload(before.name)))

    def sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        """Every prompt from every server that answers."""
        return self._run(self._sample_everywhere(prompts, params, seeds))

    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        return self.begin(prompts, params, seeds).result()

    def begin(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> "Future[tuple[Group, ...]]":
        """Like `sample`, but does not wait. The policy stays as it is until the result is there."""
        return asyncio.run_coroutine_threadsafe(self._sample(prompts, params, seeds), self._loop)

    def metrics(self) -> dict[str, float]:
        retries, self._retries = self._retries, 0
        return {"sampler/retries": retries}

    def faults(self) -> dict[str, str]:
        """By its address, why a server is left alone."""
        return {seat.server.url: seat.fault for seat in self.seats if seat.fault is not None}

    def require_fit(self) -> None:
        """Ask each server that answers what it serves. Raises EnvironmentProblem with the flag to start it with."""
        self._run(self._on_good_seats(self._require_fit))

    def require_usable(self, prompt: EncodedPrompt) -> None:
        """Raises EnvironmentProblem where the only token that may be drawn has another logprob than 0. A server that
        comes back later is asked the same."""
        self._probe = prompt
        self._run(self._on_good_seats(lambda seat: self._require_processed_logprobs(seat, prompt)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        self._last_answer = time.monotonic()
        room = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def one(prompt: EncodedPrompt, seed: int) -> Group:
            async with room:
                return await self._group(prompt, params, seed)

        tasks = [asyncio.ensure_future(one(prompt, seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # after a failure the others have nothing left to win
                task.cancel()

    async def _sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        self._last_answer = time.monotonic()
        groups: list[Group] = []

        async def ask(seat: _Seat) -> None:
            for prompt, seed in zip(prompts, seeds, strict=True):
                groups.append(await self._ask(seat, prompt, params, seed, self._request(prompt, params, seed)))

        while not groups and prompts:
            await self._pick(prompts[0], None)  # one at least answers
            await self._on_good_seats(ask)
        return tuple(groups)

    async def _group(self, prompt: EncodedPrompt, params: SamplingParams, seed: int) -> Group:
        """Try until a server has answered in full; see `_pick` for when that ends."""
        first_fault = None
        body = self._request(prompt, params, seed)
        while True:
            seat = await self._pick(prompt, first_fault)
            try:
                return await self._ask(seat, prompt, params, seed, body)
            except ServerFault as fault:
                first_fault = first_fault or time.monotonic()
                self._retries += 1
                self._leave(seat, fault)

    async def _ask(
        self, seat: _Seat, prompt: EncodedPrompt, params: SamplingParams, seed: int, body: dict[str, Any]
    ) -> Group:
        """Raises ServerFault where this server has no whole answer."""
        assert self.policy is not None
        version = self.policy.version
        seat.in_flight += 1
        try:
            answer = await seat.server.complete(body, _most_bytes(prompt, params))
            completions = self._completions(prompt, params, seed, answer, seat.server.url)
        finally:
            seat.in_flight -= 1
        seat.faults = 0
        seat.good += 1
        if seat.good >= FORGIVEN:
            seat.nonsense = 0
        self._last_answer = time.monotonic()
        self.ranks.pulse.beat()
        return Group(prompt=prompt, completions=completions, policy_version=version)

    def _request(self, prompt: EncodedPrompt, params: SamplingParams, seed: int) -> dict[str, Any]:
        assert self.policy is not None
        return {
            "model": self.policy.name,
            "messages": chat_messages(prompt),
            "add_generation_prompt": True,
            "max_completion_tokens": params.max_new_tokens,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # a token's logprob then says whose it is
            **sampling_fields(self.family, params, seed),
        }

    def _completions(
        self, prompt: EncodedPrompt, params: SamplingParams, seed: int, answer: ChatAnswer, url: str
    ) -> tuple[Completion, ...]:
        """Raises ServerFault for an answer that is not whole or not of the policy asked for."""
        assert self.policy is not None
        if answer.model != self.policy.name:
            raise AdapterMissing(f"it answered for {brief(answer.model)}, {self.policy.name} was asked")
        if answer.prompt_token_ids is None:
            raise EnvironmentProblem(f"{url}: gives no token ids (return_token_ids); update vLLM to 0.11 or newer")
        require_same_prompt(self.family, prompt, answer.prompt_token_ids, url)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if (numbers := [choice.index for choice in choices]) != list(range(params.group_size)):
            raise Nonsense(f"{CHAT}: choices: {brief(numbers)} came as indices; {params.group_size} were asked for")
        return tuple(self._completion(choice, seed + choice.index, params) for choice in choices)

    def _completion(self, choice: Choice, seed: int, params: SamplingParams) -> Completion:
        field = f"{CHAT}: choices[{choice.index}]"
        if choice.finish_reason not in ("stop", "length"):
            raise ServerFault(f"{field}.finish_reason: {brief(choice.finish_reason)} came")
        token_ids = choice.token_ids or ()
        entries = (choice.logprobs and choice.logprobs.content) or ()
        logprobs = [entry.logprob for entry in entries]
        try:
            completion = make_completion(self.family, token_ids, logprobs, choice.finish_reason, seed, params)
        except Impossible as error:
            raise Nonsense(f"{field}.{error}") from error
        for place, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
            if (entry.token or "").startswith(SCORED_ID) and entry.token != f"{SCORED_ID}{token}":
                raise Nonsense(f"{field}.logprobs[{place}]: {brief(entry.token)} came; token_ids has {token} there")
        return completion

    async def _pick(self, prompt: EncodedPrompt, first_fault: float | None) -> _Seat:
        """The server with the least to do; one that is due again is tried on the way. Raises TrainingError where none
        has answered, or this prompt has failed, for longer than the patience, and where all are left out."""
        while True:
            if all(seat.is_out for seat in self.seats):
                raise TrainingError(self._useless())
            now = time.monotonic()
            since = self._last_answer if first_fault is None else first_fault
            if now - since > self.patience_seconds and (first_fault is not None or not self._good_seats()):
                raise TrainingError(self._lost(prompt))
            due = next((s for s in self.seats if s.fault and not s.is_tried and s.next_try <= now), None)
            if due is not None:
                await self._try_again(due)
                continue
            if good := self._good_seats():
                return min(good, key=lambda each: each.in_flight)
            await asyncio.sleep(POLL_SECONDS)

    def _good_seats(self) -> list[_Seat]:
        return [seat for seat in self.seats if seat.fault is None]

    def _lost(self, prompt: EncodedPrompt) -> str:
        return (
            f"rollout.urls: row {prompt.row.id} got no answer within rollout.patience ({self.patience_seconds:g} s): "
            f"{self._reasons()}; start the servers again and give the same command, which goes on from the newest "
            "checkpoint"
        )

    def _useless(self) -> str:
        return (
            f"rollout.urls: every server has given {NONSENSE} invalid answers: {self._reasons()}; nothing of "
            "them was learnt; look into the server's log, start it again or update vLLM, and give the same command, "
            "which goes on from the newest checkpoint"
        )

    def _reasons(self) -> str:
        return "; ".join(f"{seat.server.url}: {seat.last_fault}" for seat in self.seats if seat.last_fault)

    async def _try_again(self, seat: _Seat) -> None:
        """Give a server that was lost the policy, and requests from then on."""
        assert self.policy is not None
        seat.is_tried = True
        try:
            if not await seat.server.is_healthy():
                raise ServerFault(seat.fault or "it does not answer /health")
            await self._require_fit(seat)
            await seat.server.load(self.policy.name, self.policy.directory)
            if self._probe is not None:
                await self._require_processed_logprobs(seat, self._probe)
        except ServerFault as fault:
            self._leave(seat, fault)
        else:
            seat.fault = None
            self.say(f"{seat.server.url} is back, with {self.policy.name}")
        finally:
            seat.is_tried = False

    def _leave(self, seat: _Seat, fault: ServerFault) -> None:
        """For a while; for the rest of the run where it talks nonsense."""
        is_news = seat.fault is None
        seat.fault = seat.last_fault = str(fault)
        if is_news or seat.is_tried:  # of many requests that fail together the first counts
            seat.next_try = time.monotonic() + BACKOFF_SECONDS[min(seat.faults, len(BACKOFF_SECONDS) - 1)]
            seat.faults += 1
            if isinstance(fault, Nonsense):
                seat.nonsense, seat.good = seat.nonsense + 1, 0
        if seat.is_out and seat.next_try != math.inf:
            seat.next_try = math.inf
            self.say(f"{seat.server.url} is left out from here on: {NONSENSE} invalid answers, the last: {fault}")
        elif is_news:
            self.say(f"{seat.server.url} failed ({fault}); its prompts are tried again")

    async def _unload(self, name: str) -> None:
        async def unload(server: VllmServer) -> None:
            with suppress(ServerFault):  # one that is gone has forgotten it
                await server.unload(name)

        await asyncio.gather(*(unload(seat.server) for seat in self._good_seats()))

    async def _close(self) -> None:
        """Requests that nobody waits for any more are cancelled, which closes their connections."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for seat in self.seats:
            await seat.server.close()

    async def _on_good_seats(self, work: Callable[[_Seat], Coroutine[Any, Any, None]]) -> None:
        """On all at a time; a server that fails is left alone."""

        async def on(seat: _Seat) -> None:
            try:
                await work(seat)
            except ServerFault as fault:
                self._leave(seat, fault)

        await asyncio.gather(*(on(seat) for seat in self._good_seats()))

    async def _require_fit(self, seat: _Seat) -> None:
        base = (await seat.server.models())[0]
        if base.max_model_len is not None and base.max_model_len < self.needs.row_tokens:
            raise EnvironmentProblem(
                f"{seat.server.url}: takes {base.max_model_len} tokens, a prompt and its completion are up to "
                f"{self.needs.row_tokens}; start it with --max-model-len {self.needs.row_tokens}"
            )
        if base.root and Path(base.root).name not in {Path(name).name for name in self.needs.model_names}:
            raise EnvironmentProblem(
                f"{seat.server.url}: serves {brief(base.root)}, the recipe's model.path is "
                f"{self.needs.model_names[0]}; start it with that one"
            )

    async def _require_processed_logprobs(self, seat: _Seat, prompt: EncodedPrompt) -> None:
        only = self.family.checkpoint.end_token_ids[0]
        body = self._request(prompt, _one_token(), 0) | {"allowed_token_ids": [only], "min_tokens": 0}
        answer = await seat.server.complete(body)
        entries = [entry for choice in answer.choices if choice.logprobs for entry in choice.logprobs.content or ()]
        if not entries:
            raise EnvironmentProblem(f"{seat.server.url}: gives no logprobs; update vLLM")
        if abs(entries[0].logprob) > ROUNDING:
            raise EnvironmentProblem(
                f"{seat.server.url}: gives logprobs of the raw logits; start it with --logprobs-mode processed_logprobs"
            )


def connect(
    recipe: GrpoRecipe, family: Family, ranks: Ranks = ALONE, say: Callable[[str], None] = lambda text: None
) -> ServerSampler:
    """The recipe's servers, with the key of the environment. Raises EnvironmentProblem where one that answers was
    started with another model or too short a context."""
    rollout = recipe.rollout
    key = servers_key()
    sampler = ServerSampler(
        family,
        [VllmServer(url, key, rollout.request_timeout) for url in rollout.urls],
        Needs(
            model_names=(recipe.model.path, family.checkpoint.path),
            row_tokens=recipe.data.max_prompt_tokens + rollout.max_new_tokens,
        ),
        patience_seconds=rollout.patience,
        ranks=ranks,
        say=say,
    )
    ranks.on_first(sampler.require_fit)
    return sampler


def chat_messages(prompt: EncodedPrompt) -> list[dict[str, Any]]:
    """The prompt's turns with the pictures as the family resized them, each as bytes once."""
    pictures = iter(prompt.images)
    return [{"role": message.role, "content": _parts(message, pictures)} for message in prompt.messages]


def _parts(message: Message, pictures: Iterator[EncodedImage]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(message.content.split("<image>")):
        if number:
            parts.append({"type": "image_url", "image_url": {"url": _data_url(next(pictures))}})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _data_url(image: EncodedImage) -> str:
    buffer = io.BytesIO()
    picture_image(image.views[0]).save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _most_bytes(prompt: EncodedPrompt, params: SamplingParams) -> int:
    """Of an answer that may be."""
    return SHORT_ANSWER + BYTES_PER_TOKEN * (len(prompt.token_ids_P) + params.group_size * params.max_new_tokens)


def _one_token() -> SamplingParams:
    return SamplingParams(
        group_size=1,
        min_new_tokens=0,
        max_new_tokens=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=(),
        greedy=False,
    )

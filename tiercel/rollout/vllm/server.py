"""The `vllm-server` engine: completions from any number of vLLM servers, without changes to vLLM.

A prompt is one request, whose answer is used once or not at all. The prompts of a server that fails go to the others
(server_states.py).
"""

import asyncio
import resource
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.errors import EnvironmentProblem
from tiercel.http_json import brief
from tiercel.models.families.base import Family
from tiercel.rollout.dialogue import Dialogues
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.trajectory import TrajectoryBuilder, begun_trajectories
from tiercel.rollout.vllm.http import (
    CHAT,
    GENERATE,
    SHORT_ANSWER,
    AdapterMissing,
    InvalidAnswer,
    ServerFault,
    ServerFaults,
    ServerRequirements,
    VllmServer,
    servers_key,
)
from tiercel.rollout.vllm.protocol import CompletionChoice, Completions
from tiercel.rollout.vllm.requests import (
    ROUNDING,
    ImpossibleCompletion,
    PromptRequest,
    add_sampled,
    make_completion,
    require_same_prompt,
)
from tiercel.rollout.vllm.routes import BODIES
from tiercel.rollout.vllm.server_states import ServerState, ServerStates
from tiercel.types import Completion, EncodedPrompt, Group

REQUESTS_IN_FLIGHT = 64  # of one rank, over all servers
BYTES_PER_TOKEN = 1024  # limit of an answer; vLLM needs about 150
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPool:
    """The servers that a run samples from, and how they are used."""

    servers: tuple[VllmServer, ...]
    needs: ServerRequirements
    patience_seconds: float  # how long there may be no answer before the run ends
    route: str = CHAT  # the path of what a server is asked for
    takes_adapters: bool = True  # otherwise it takes all weights
    versions: int = 1  # of the policy that completions are drawn from at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """The policy to sample from."""

    version: int
    name: str
    directory: Path
    is_whole: bool = False  # a model, whose weights replace the server's own, instead of an adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupRequest(PromptRequest):
    """The request for a group, which goes to one server after another."""

    policy: LoadedPolicy


class ServerSampler:
    """Sampler from servers, which sends each prompt to the server with the fewest requests. Raises TrainingError if
    none has answered for the pool's `patience_seconds`.

    All requests run in one event loop, in a separate thread.
    """

    shares_weights = False

    def __init__(self, family: Family, pool: ServerPool, ranks: Ranks = ALONE):
        self.family = family
        self.pool = pool
        self.states = ServerStates(pool.servers, pool.patience_seconds)
        self.ranks = ranks
        self.policy: LoadedPolicy | None = None
        self._loaded: list[LoadedPolicy] = []  # it and earlier ones from which completions are still drawn
        self._probe: EncodedPrompt | None = None  # the prompt that checks a server that is back
        self._retries = 0  # requests that were sent again
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that the process can end no matter what a server does.
        threading.Thread(target=self._loop.run_forever, name="tiercel-vllm-servers", daemon=True).start()

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Unload the policy from the servers and close all connections."""
        if self.ranks.is_first:
            self._run(self._unload(self._loaded))
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        """Load the version into every server that answers. The others get it when they are back, and get no requests of
        any rank before. Older versions are unloaded once no completion is drawn from them any more."""
        assert adapter_directory is not None
        directory = adapter_directory.absolute()
        policy = LoadedPolicy(
            version=version, name=directory.name, directory=directory, is_whole=not self.pool.takes_adapters
        )
        before = [each for each in self._loaded if each.name != policy.name]
        self.policy, is_new = policy, len(before) == len(self._loaded)
        kept = self.pool.versions - 1
        self._loaded = [*before[-kept:], policy] if kept else [policy]
        if is_new:
            self._run(self._leave_all(self.ranks.run_on_first(lambda: self._faults_after_loading(policy))))
        gone = [each for each in before if each not in self._loaded]
        self.ranks.run_on_first(lambda: self._run(self._unload(gone)))

    def _faults_after_loading(self, policy: LoadedPolicy) -> dict[str, str]:
        self._run(self.states.on_good(lambda state: self._load(state, policy)))
        return self.faults()

    async def _leave_all(self, faults: Mapping[str, str]) -> None:
        """Leave the servers that did not get the policy from the first rank. This rank may have met no fault of theirs,
        and a server's own weights have no name by which an answer from older ones would be noticed."""
        for state in self.states.good:
            if (reason := faults.get(state.server.url)) is not None:
                self.states.leave(state, ServerFault(reason))

    def sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        """Sample every prompt from every server that answers."""
        return self._run(self._sample_everywhere(prompts, params, seeds))

    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        seeds: Sequence[int],
        dialogues: Dialogues | None = None,
    ) -> tuple[Group, ...]:
        if dialogues is None:
            return self.begin(prompts, params, seeds).result()
        begun = begun_trajectories(self.family, prompts, params, seeds, dialogues)
        return self._run(self._sample_trajectories(begun, params))

    def begin(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> "Future[tuple[Group, ...]]":
        """Sample from the policy as it is now, without waiting. The result must be there before as many further
        policies are loaded as the pool has versions."""
        return asyncio.run_coroutine_threadsafe(self._sample(self._asked(prompts, params, seeds)), self._loop)

    def metrics(self) -> dict[str, float]:
        retries, self._retries = self._retries, 0
        return {"sampler/retries": retries}

    def faults(self) -> dict[str, str]:
        """Return the reason for each server that gets no requests, by its address."""
        return self.states.faults

    def require_fit(self) -> None:
        """Check that each server that answers has the right model and context length. Raises EnvironmentProblem, with
        the right flag."""
        self._run(self.states.on_good(self._require_fit))

    def require_usable(self, prompt: EncodedPrompt) -> None:
        """Raise EnvironmentProblem if a server gives logprobs of the raw logits, that is, if the only token that may be
        drawn has a logprob other than 0. A server that comes back later is checked in the same way."""
        self._probe = prompt
        self._run(self.states.on_good(lambda state: self._require_processed_logprobs(state, prompt)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _asked(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> list[_GroupRequest]:
        assert self.policy is not None
        return [
            _GroupRequest(prompt=prompt, params=params, seed=seed, policy=self.policy)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    async def _sample(self, every: Sequence[_GroupRequest]) -> tuple[Group, ...]:
        self.states.note_sign()
        room = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def one(asked: _GroupRequest) -> Group:
            async with room:
                return await self._group(asked)

        return await together(map(one, every))

    async def _sample_trajectories(
        self, begun: Sequence[Sequence[TrajectoryBuilder]], params: SamplingParams
    ) -> tuple[Group, ...]:
        """Sample all trajectories side by side; none waits for the answers of another."""
        assert self.policy is not None
        self.states.note_sign()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # a request holds one
        most = min(REQUESTS_IN_FLIGHT * params.group_size, max(REQUESTS_IN_FLIGHT, files))  # a turn is a request
        room, policy = asyncio.Semaphore(most), self.policy

        async def one(builder: TrajectoryBuilder) -> Completion:
            while True:
                async with room:
                    group = await self._group(_GroupRequest.of_turn(builder, params, policy=policy))
                reply = add_sampled(builder, group.completions[0])
                if reply is None or not builder.add_reply(await asyncio.wrap_future(reply)):
                    return await asyncio.to_thread(builder.completion)

        async def of_prompt(builders: Sequence[TrajectoryBuilder]) -> Group:
            completions = await asyncio.gather(*map(one, builders))
            return Group(prompt=builders[0].prompt, completions=tuple(completions), policy_version=policy.version)

        return await together(map(of_prompt, begun))

    async def _sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        self.states.note_sign()
        groups: list[Group] = []

        async def ask(state: ServerState) -> None:
            for asked in self._asked(prompts, params, seeds):
                groups.append(await self._ask(state, asked, await self._request(asked)))

        first_fault: float | None = None
        while not groups and prompts:
            await self.states.pick(prompts[0], first_fault, self._restore)  # wait until a server answers
            await self.states.on_good(ask)
            first_fault = first_fault or time.monotonic()
        return tuple(groups)

    async def _group(self, asked: _GroupRequest) -> Group:
        """Request a group until a server has given a complete answer. Raises as `ServerStates.pick` does."""
        faults = ServerFaults()
        body = await self._request(asked)
        while True:
            state = await self.states.pick(asked.prompt, faults.first, self._restore)
            try:
                return await self._ask(state, asked, body)
            except ServerFault as fault:
                faults.add(fault)
                self._retries += 1
                self.states.leave(state, fault)

    async def _ask(self, state: ServerState, asked: _GroupRequest, body: dict[str, Any]) -> Group:
        """Request a group from one server. Raises ServerFault if it gives no complete answer."""
        body = body | {"model": await self._served_name(state, asked.policy)}
        state.in_flight += 1
        try:
            answer = await state.server.complete(self.pool.route, body, _most_bytes(asked))
            completions = self._completions(asked, answer, state)
        finally:
            state.in_flight -= 1
        state.count_good_answer()
        self.states.note_sign()
        self.ranks.heartbeat.beat()
        return Group(prompt=asked.prompt, completions=completions, policy_version=asked.policy.version)

    async def _request(self, asked: _GroupRequest, **fields: Any) -> dict[str, Any]:
        return await BODIES[self.pool.route](self.family, asked.policy.name, asked, **fields)

    def _completions(self, asked: _GroupRequest, answer: Completions, state: ServerState) -> tuple[Completion, ...]:
        """Make the completions of an answer. Raises ServerFault if it is not complete or comes from another policy, and
        EnvironmentProblem if vLLM is too old or has encoded another prompt."""
        url, name = state.server.url, state.base if asked.policy.is_whole else asked.policy.name
        if answer.model != name:
            raise AdapterMissing(f"it answered with {brief(answer.model)}; {name} was requested")
        if answer.prompt_token_ids is None:
            raise EnvironmentProblem(f"{url}: returns no token ids (return_token_ids); update vLLM to 0.11 or newer")
        require_same_prompt(self.family, asked.prompt, answer.prompt_token_ids, url)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if (numbers := [choice.index for choice in choices]) != list(range(asked.params.group_size)):
            raise InvalidAnswer(
                f"{self.pool.route}: choices: got {brief(numbers)} as indices; {asked.params.group_size} were requested"
            )
        return tuple(self._completion(choice, asked.seed + choice.index, asked.params) for choice in choices)

    def _completion(self, choice: CompletionChoice, seed: int, params: SamplingParams) -> Completion:
        field = f"{self.pool.route}: choices[{choice.index}]"
        if choice.finish_reason not in ("stop", "length"):
            raise ServerFault(f"{field}.finish_reason: got {brief(choice.finish_reason)}")
        token_ids = choice.token_ids or ()
        entries = (choice.logprobs and choice.logprobs.content) or ()
        logprobs = [entry.logprob for entry in entries]
        try:
            completion = make_completion(self.family, token_ids, logprobs, choice.finish_reason, seed, params)
        except ImpossibleCompletion as error:
            raise InvalidAnswer(f"{field}.{error}") from error
        for place, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
            if entry.named_id not in (None, str(token)):
                raise InvalidAnswer(
                    f"{field}.logprobs[{place}]: got {brief(entry.named_id)}, but token_ids has {token} there"
                )
        return completion

    async def _restore(self, state: ServerState) -> str:
        """Check a server that had failed, load the policies into it, and return the name of the newest."""
        assert self.policy is not None
        await self._require_fit(state)
        for policy in self._loaded:
            await self._load(state, policy)
        if self._probe is not None:
            await self._require_processed_logprobs(state, self._probe)
        return self.policy.name

    async def _load(self, state: ServerState, policy: LoadedPolicy) -> None:
        """Load a policy into a server."""
        if policy.is_whole:
            await state.server.load_weights(policy.directory)
        else:
            await state.server.load(policy.name, policy.directory)

    async def _served_name(self, state: ServerState, policy: LoadedPolicy) -> str:
        """Return a policy's name at a server: the adapter's, or the name of the server's own model."""
        if policy.is_whole and not state.base:
            await self._require_fit(state)
        return state.base if policy.is_whole else policy.name

    async def _unload(self, policies: Sequence[LoadedPolicy]) -> None:
        async def unload(server: VllmServer, policy: LoadedPolicy) -> None:
            with suppress(ServerFault):  # a server that has ended no longer has it
                await server.unload(policy.name)

        adapters = [policy for policy in policies if not policy.is_whole]  # the next version replaces a whole one
        good = self.states.good
        await asyncio.gather(*(unload(state.server, policy) for state in good for policy in adapters))

    async def _close(self) -> None:
        """Cancel the requests that are left, which closes their connections, and close all clients."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)  # none of them meets a client that is closed
        for state in self.states.every:
            await state.server.close()

    async def _require_fit(self, state: ServerState) -> None:
        state.base = (await state.server.fitting(self.pool.needs)).id

    async def _require_processed_logprobs(self, state: ServerState, prompt: EncodedPrompt) -> None:
        only = self.family.checkpoint.end_token_ids[0]
        (asked,) = self._asked([prompt], SamplingParams(max_new_tokens=1), [0])
        body = await self._request(asked, allowed_token_ids=[only], min_tokens=0)
        body |= {"model": await self._served_name(state, asked.policy)}
        answer = await state.server.complete(self.pool.route, body)
        entries = [entry for choice in answer.choices if choice.logprobs for entry in choice.logprobs.content or ()]
        if not entries:
            raise EnvironmentProblem(f"{state.server.url}: returns no logprobs; update vLLM")
        if abs(entries[0].logprob) > ROUNDING:
            raise EnvironmentProblem(
                f"{state.server.url}: returns logprobs of the raw logits; start it with --logprobs-mode "
                "processed_logprobs"
            )


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Await all at the same time. If one fails, cancel the others and wait until they have ended, so that none of them
    meets a client that the caller has closed."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def connect(recipe: GrpoRecipe, family: Family, ranks: Ranks = ALONE) -> ServerSampler:
    """Make a sampler for the recipe's servers, with the key of the environment. Raises EnvironmentProblem if a server
    that answers was started with another model or too short a context."""
    rollout = recipe.rollout
    key = servers_key()
    pool = ServerPool(
        servers=tuple(VllmServer(url, key, rollout.request_timeout) for url in rollout.urls),
        needs=ServerRequirements(
            model_names=(recipe.model.path, family.checkpoint.path),
            row_tokens=recipe.data.max_prompt_tokens + rollout.longest,
        ),
        patience_seconds=rollout.patience,
        route=GENERATE if rollout.continues else CHAT,
        takes_adapters=recipe.lora is not None,
        versions=rollout.versions,
    )
    sampler = ServerSampler(family, pool, ranks)
    ranks.run_on_first(sampler.require_fit)
    return sampler


def _most_bytes(asked: _GroupRequest) -> int:
    """Return the limit of bytes for an answer to this request."""
    tokens = len(asked.prompt.token_ids_P) + asked.params.group_size * asked.params.max_new_tokens
    return SHORT_ANSWER + BYTES_PER_TOKEN * tokens

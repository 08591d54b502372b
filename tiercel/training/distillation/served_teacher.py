"""A teacher that a vLLM server computes, with one request per completion. The request's prompt is the teacher's
followed by the completion, and the answer has the logprobs of the prompt's tokens. Shape suffixes: docs/shapes.md."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch

from tiercel.algorithms.teacher import Teacher
from tiercel.config.schema import GrpoRecipe, Rollout
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.http_json import brief, run_requests
from tiercel.models.families.base import Family
from tiercel.models.families.loading import family_of
from tiercel.packing.batch import AdvantageGroup
from tiercel.packing.divergence import TeacherTokens
from tiercel.packing.layout import Continuation
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.vllm.http import (
    GENERATE,
    NONSENSE,
    SHORT_ANSWER,
    InvalidAnswer,
    ServerFault,
    ServerFaults,
    ServerRequirements,
    VllmServer,
    servers_key,
)
from tiercel.rollout.vllm.protocol import WordLogprob
from tiercel.rollout.vllm.requests import ROUNDING, UNKNOWN, PromptRequest, require_same_prompt
from tiercel.rollout.vllm.routes import token_body
from tiercel.rollout.vllm.server import together
from tiercel.types import EncodedPrompt

REQUESTS_IN_FLIGHT = 16  # of one rank; an answer may be megabytes long
BYTES_PER_WORD = 192  # limit of an answer; vLLM needs about 75
PARAMS = SamplingParams(max_new_tokens=1, greedy=True)  # the generated token is not used
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTeacher:
    """A teacher on a server, which each rank asks for its own completions."""

    section: Teacher
    key: str  # the section's
    family: Family
    needs: ServerRequirements
    rollout: Rollout  # its patience and time limit apply here too
    ranks: Ranks
    distribution: ClassVar[None] = None  # a server gives no states

    def require_answer(self) -> None:
        """Raise EnvironmentProblem if the server does not answer, or does not fit."""
        try:
            run_requests(self._with_server(lambda server: server.fitting(self.needs)))
        except ServerFault as fault:
            remedy = "docs/vllm.md says how to start it"
            raise EnvironmentProblem(f"{self.key}.url: {self.section.url}: {fault}; {remedy}") from fault

    def tokens(self, groups: Sequence[AdvantageGroup]) -> list[TeacherTokens]:
        """Return what the teacher says about every completion. If a rank fails, all raise: EnvironmentProblem if only
        the user can help, TrainingError if no good answer came within the patience."""
        asked = [(_whole(group.item.prompt, each), each) for group in groups for each in group.item.continuations]
        return self.ranks.run_on_all(lambda: run_requests(self._with_server(lambda server: self._all(server, asked))))

    async def _with_server(self, work: Callable[[VllmServer], Awaitable[T]]) -> T:
        assert self.section.url is not None
        server = VllmServer(self.section.url, servers_key(), self.rollout.request_timeout)
        try:
            return await work(server)
        finally:
            await server.close()

    async def _all(
        self, server: VllmServer, asked: Sequence[tuple[EncodedPrompt, Continuation]]
    ) -> list[TeacherTokens]:
        room = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def one(whole: EncodedPrompt, continuation: Continuation) -> TeacherTokens:
            async with room:
                return await self._patiently(server, whole, lambda: self._ask(server, base.id, whole, continuation))

        if not asked:
            return []
        base = await self._patiently(server, asked[0][0], lambda: server.fitting(self.needs))
        return list(await together(one(*each) for each in asked))

    async def _patiently(self, server: VllmServer, whole: EncodedPrompt, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is a good answer. A server that has failed may have been restarted with another model."""
        faults = ServerFaults()
        while True:
            self.ranks.heartbeat.beat()
            try:
                if faults.in_a_row:
                    await server.fitting(self.needs)
                return await ask()
            except ServerFault as fault:
                pause = faults.add(fault)
                if faults.are_too_wrong or faults.lasted(self.rollout.patience):
                    few = f"{NONSENSE} invalid answers, none of which was trained on"
                    none = f"no answer within rollout.patience ({self.rollout.patience:g} s)"
                    raise TrainingError(
                        f"{self.key}.url: row {whole.row.id} got {few if faults.are_too_wrong else none}: "
                        f"{server.url}: {fault}; check the server's log, restart it, and run the same command again "
                        "to resume from the newest checkpoint"
                    ) from fault
                await asyncio.sleep(pause)

    async def _ask(
        self, server: VllmServer, model: str, whole: EncodedPrompt, continuation: Continuation
    ) -> TeacherTokens:
        """Ask for one completion. Placeholders may be among the likeliest words, so that many more are asked for."""
        told = min((self.section.top_k or 0) + len(self._excluded), self.family.vocabulary_size)
        fields = {"prompt_logprobs": told, "detokenize": False, "bad_words": []}
        body = await token_body(self.family, model, PromptRequest(prompt=whole, params=PARAMS, seed=0), **fields)
        most_bytes = SHORT_ANSWER + BYTES_PER_WORD * (told + 2) * len(whole.token_ids_P)
        answer = await server.complete(GENERATE, body, most_bytes)
        if answer.prompt_logprobs is None or answer.prompt_token_ids is None:
            raise EnvironmentProblem(f"{server.url}: returns no logprobs of prompts; start vLLM 0.32 or newer")
        require_same_prompt(self.family, whole, answer.prompt_token_ids, server.url)
        if answer.model != model or len(answer.prompt_logprobs) != len(whole.token_ids_P):
            came = f"got {len(answer.prompt_logprobs)} places of {brief(answer.model)}"
            raise InvalidAnswer(
                f"{GENERATE}: prompt_logprobs: {came}; {len(whole.token_ids_P)} of {model} were requested"
            )
        return self._read(answer.prompt_logprobs, told, whole, continuation)

    def _read(
        self,
        answers: Sequence[Mapping[int, WordLogprob] | None],
        told: int,
        whole: EncodedPrompt,
        continuation: Continuation,
    ) -> TeacherTokens:
        """Read the scored tokens' logprobs. The probability of placeholders in the answer goes to all other words."""
        start = len(whole.token_ids_P) - len(continuation.token_ids_L)
        drawn: list[float] = []
        words: list[list[tuple[float, int]]] = []
        for place in (start + continuation.is_scored_L.nonzero()[:, 0]).tolist():
            token = int(whole.token_ids_P[place])
            logprobs = {word: entry.logprob for word, entry in (answers[place] or {}).items()}
            sane = all(UNKNOWN < value <= ROUNDING for value in logprobs.values())
            if not sane or sum(map(math.exp, logprobs.values())) > 1 + ROUNDING or len(logprobs) < told:
                raise InvalidAnswer(f"{GENERATE}: prompt_logprobs[{place}]: got {brief(logprobs)}, not {told} logprobs")
            if token not in logprobs or max(logprobs) >= self.family.vocabulary_size:
                raise InvalidAnswer(f"{GENERATE}: prompt_logprobs[{place}]: got {brief(logprobs)} for token {token}")
            own = logprobs[token]
            lost = sum(math.exp(logprobs.pop(word)) for word in self._excluded if word in logprobs)
            shift = math.log1p(-min(lost, 1 - ROUNDING))
            likeliest = sorted(((value - shift, word) for word, value in logprobs.items()), reverse=True)
            drawn.append(own - shift)
            words.append(likeliest[: self.section.top_k])
        if self.section.top_k is None:
            return TeacherTokens(drawn_N=torch.tensor(drawn))
        values, ids = ([[pair[part] for pair in row] for row in words] for part in (0, 1))
        return TeacherTokens(
            drawn_N=torch.tensor(drawn), words_NK=torch.tensor(ids, dtype=torch.int64), logprobs_NK=torch.tensor(values)
        )

    @property
    def _excluded(self) -> list[int]:
        return [word for word in self.family.placeholder_ids if word < self.family.vocabulary_size]


def _whole(prompt: EncodedPrompt, continuation: Continuation) -> EncodedPrompt:
    """Return the prompt followed by a completion. Its positions are not used."""
    token_ids_P = torch.cat([prompt.token_ids_P, continuation.token_ids_L])
    return replace(prompt, token_ids_P=token_ids_P, images=(*prompt.images, *continuation.images))


def recipe_of_teacher(recipe: GrpoRecipe, section: Teacher) -> GrpoRecipe:
    """Return the recipe with the teacher as its model, in its own dtype even if the policy is quantised."""
    source = {f"model.{name}": getattr(section, name) for name in ("path", "hub", "revision", "dtype")}
    pixels = section.max_pixels or recipe.model.max_pixels
    own = {"model.max_pixels": pixels, "model.quantize": None, "data.template": section.template}
    return recipe.with_values({**source, **own})


def open_served(recipe: GrpoRecipe, section: Teacher, ranks: Ranks = ALONE) -> ServedTeacher:
    """Make the teacher of a recipe that a server computes. Reads no weights."""
    chosen, rollout = recipe_of_teacher(recipe, section), recipe.rollout
    family = family_of(chosen)
    key = recipe.teacher_key
    needs = ServerRequirements(
        model_names=(section.path, family.checkpoint.path),
        row_tokens=recipe.data.max_prompt_tokens + rollout.longest + PARAMS.max_new_tokens,
        key=f"{key}.path",
    )
    return ServedTeacher(section=section, key=key, family=family, needs=needs, rollout=rollout, ranks=ranks)

"""Run the reward `judge`: a model behind an OpenAI-compatible address grades completions, many at a time."""

import asyncio
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

import httpx
from pydantic import Field

from tiercel.config.schema import Reliability
from tiercel.errors import DataError, RecipeError
from tiercel.http_json import (
    HttpReply,
    NoAnswer,
    ServerAnswer,
    WrongAnswer,
    ask,
    environment_options,
    key_of,
    new_client,
    run_requests,
)
from tiercel.reliability.redaction import redact_answer
from tiercel.reward_types import RewardValue, Sample
from tiercel.rewards.answers import extract_answer
from tiercel.rewards.external import ByJudge

PLACES = ("prompt", "completion", "answer")
QUESTION = """\
You grade an answer to a question. Judge only whether it is right and complete, not its style or length.

Question:
{prompt}

Right answer:
{answer}

Answer to grade:
{completion}

Reply with a whole number from 0 (wrong) to 10 (right), inside <answer></answer>, and nothing else.
"""
WORTH_A_TRY = {408, 409, 425, 429, *range(500, 600)} - {501, 505}
FIRST_PAUSE = 0.5  # seconds; doubled with every try
MOST_BYTES = 1 << 22  # the largest reply
_NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_GRADE = re.compile(rf"\s*(?P<grade>{_NUMBER})\s*(?:/\s*(?P<of>{_NUMBER}))?\s*\.?\s*")
LONGEST_REPLY = 300  # characters of a reply that a message shows


class _Unanswered(Exception):
    """A request did not get a grade; the text says why."""


class _Text(ServerAnswer):
    content: str


class _Choice(ServerAnswer):
    message: _Text


class ChatReply(ServerAnswer):
    """The part of a chat completion that is read."""

    choices: Annotated[tuple[_Choice, ...], Field(min_length=1)]


class JudgeReward:
    """Asks for a grade of each completion, with at most `judge.concurrency` requests at a time. Each is retried after a
    pause if the server is busy, fails or does not answer. A completion without a grade is unscorable."""

    def __init__(self, reward: ByJudge, reliability: Reliability):
        self._reward, self._judge = reward, reward.judge
        self._batch_timeout = reliability.reward_timeout
        self._headers: dict[str, str] = {}
        self._client_options: dict[str, Any] = {}
        self._question = QUESTION

    def start(self) -> None:
        """Read the key, the question, and what the environment says of the way to the judge. Raises RecipeError."""
        judge = self._judge
        if judge.key is not None:
            try:
                key = key_of(judge.key)
            except ValueError as error:
                raise RecipeError([f"judge.key: {error}"]) from None
            if key is None:
                raise RecipeError([f"judge.key: is {judge.key}, which is not set in the environment; export it"])
            self._headers = {"Authorization": f"Bearer {key}"}
        try:
            self._client_options = environment_options(judge.url)
        except ValueError as error:
            raise RecipeError([f"judge.url: {error}"]) from None
        if judge.prompt is not None:
            self._question = _read_question(judge.prompt)

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        """Ask for a grade of each sample, divided by `judge.best`; None if the question asks for a right answer that
        the row does not have. All of them together take at most reliability.reward_timeout seconds."""
        return run_requests(self._score_all(samples))

    def close(self) -> None:
        """Do nothing: no connection is open between two batches."""

    async def _score_all(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        gate = asyncio.Semaphore(self._judge.concurrency)
        limits = httpx.Limits(max_connections=self._judge.concurrency)
        async with new_client(headers=self._headers, limits=limits, **self._client_options) as client:
            tasks = [asyncio.create_task(self._score_one(sample, client, gate)) for sample in samples]
            if tasks:
                await asyncio.wait(tasks, timeout=self._batch_timeout)
            late = f"no grade within reliability.reward_timeout = {self._batch_timeout:g} s for the whole batch"
            values = [task.result() if task.done() else self._failure(late) for task in tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(values)

    async def _score_one(self, sample: Sample, client: httpx.AsyncClient, gate: asyncio.Semaphore) -> RewardValue:
        try:
            question = self._filled(sample)
        except DataError as error:
            return RewardValue(value=None, failure=str(error))
        if question is None:
            return RewardValue(value=None)
        try:
            async with gate:
                reply = await self._ask(client, question)
            grade = self._grade(reply)
        except (_Unanswered, ValueError, LookupError, TypeError) as error:  # text that cannot be sent or filled in
            return self._failure(f"row {sample.id}: {error}")
        return RewardValue(value=float(min(Fraction(1), max(Fraction(0), grade))))

    def _grade(self, reply: str) -> Fraction:
        """Read the grade, divided by `judge.best`; it is a number or number/best, and nothing else in the answer.
        Raises _Unanswered."""
        best = Fraction(repr(self._judge.best))
        found = _GRADE.fullmatch(extract_answer(reply))
        if found is None or (found["of"] is not None and Fraction(found["of"]) != best):
            raise _Unanswered(f"the reply contains no grade: {reply[:LONGEST_REPLY]!r}")
        return Fraction(found["grade"]) / best

    def _failure(self, text: str) -> RewardValue:
        return RewardValue(value=None, failure=f"reward judge at {self._judge.url}: {text}")

    def _filled(self, sample: Sample) -> str | None:
        """Return the question about a sample; None if it asks for a right answer that the row does not have."""
        answer = ""
        if any(name == "answer" for _, name, _, _ in Formatter().parse(self._question)):
            truth = self._reward.truth(sample)
            if truth is None:
                return None
            answer = " or ".join(truth.texts())
        return self._question.format(prompt=sample.prompt, completion=sample.completion, answer=answer)

    async def _ask(self, client: httpx.AsyncClient, question: str) -> str:
        """Return the text of the judge's reply. Raises _Unanswered."""
        address = f"{self._judge.url.rstrip('/')}/chat/completions"
        pause, trouble = FIRST_PAUSE, ""
        for number in range(self._judge.retries + 1):
            if number:
                await asyncio.sleep(pause)
                pause *= 2
            request = client.build_request("POST", address, json=self._body(question))
            try:
                reply = await ask(client, request, seconds=self._judge.timeout, most_bytes=MOST_BYTES)
            except NoAnswer as error:
                trouble = str(error)
                continue
            except WrongAnswer as error:
                raise _Unanswered(f"the reply is not a chat completion: {error}") from error
            if reply.status == 200:
                return _text_of(reply)
            trouble = f"status {reply.status}: {reply.text()}"
            if reply.status not in WORTH_A_TRY:
                raise _Unanswered(trouble)
        raise _Unanswered(f"{trouble} (tried {self._judge.retries + 1} times)")

    def _body(self, question: str) -> dict[str, Any]:
        return {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": self._judge.max_tokens,
        }


def _text_of(reply: HttpReply) -> str:
    try:
        return redact_answer(reply.read(ChatReply).choices[0].message.content)
    except (NoAnswer, WrongAnswer) as error:
        raise _Unanswered(f"the reply is not a chat completion: {error}") from error


def _read_question(file: str) -> str:
    """Read the question's file. Raises RecipeError if it has placeholders other than those that are filled in."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        names = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        if names <= set(PLACES):
            text.format(**dict.fromkeys(PLACES, ""))
    except (OSError, ValueError, LookupError) as error:
        raise RecipeError(
            [f"judge.prompt: {file} cannot be read: {error}; to write a brace as text, double it"]
        ) from error
    if odd := sorted(names - set(PLACES)):
        places = ", ".join(f"{{{place}}}" for place in PLACES)
        raise RecipeError([f"judge.prompt: {file} contains {{{odd[0]}}}, but the placeholders are {places}"])
    if "completion" not in names:
        raise RecipeError(
            [f"judge.prompt: {file} does not contain {{completion}}, so the judge would not see what to grade; add it"]
        )
    return text

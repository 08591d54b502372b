"""What a vLLM server may answer: the fields that tiercel reads of its OpenAI-compatible protocol, and no others.

A list ends at its first fault, so that an answer of faults alone costs no more than a good one.
"""

from typing import Annotated, TypeVar

from pydantic import Field

from tiercel.http_json import Answer

Entry = TypeVar("Entry")
Every = Annotated[tuple[Entry, ...], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ServedModel(Answer):
    """The base model, or an adapter of it."""

    id: str
    root: str | None = None  # what it was loaded from
    max_model_len: Annotated[int, Field(gt=0)] | None = None  # tokens


class ModelList(Answer):
    """/v1/models: the base model first, then the loaded adapters."""

    data: Annotated[Every[ServedModel], Field(min_length=1)]


class TokenLogprob(Answer):
    """Of a sampled token. `token` is `token_id:N`, for that is asked for; servers of old write its text."""

    token: str | None = None
    logprob: float


class Logprobs(Answer):
    content: Every[TokenLogprob] | None = None


class Text(Answer):
    """What a completion says; tiercel decodes the ids itself."""

    content: str | None = None


class Choice(Answer):
    """One of a prompt's completions."""

    index: Annotated[int, Field(ge=0)]
    finish_reason: str | None = None
    message: Text | None = None
    token_ids: Every[TokenId] | None = None
    logprobs: Logprobs | None = None


class ChatAnswer(Answer):
    """/v1/chat/completions"""

    model: str
    choices: Every[Choice]
    prompt_token_ids: Every[TokenId] | None = None


class ErrorDetail(Answer):
    message: str


class Refusal(Answer):
    """What vLLM, of any version, and what it is built on say of an error."""

    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: str | None = None

    def words(self) -> str | None:
        if isinstance(self.error, ErrorDetail):
            return self.error.message
        return self.error or self.message or self.detail

"""Models of the answers of a vLLM server: the fields of its OpenAI-compatible protocol that tiercel reads.

Reading a list stops at the first wrong entry, so that a list of wrong entries takes no longer than a good one.
"""

from typing import Annotated, TypeVar

from pydantic import Field

from tiercel.http_json import ServerAnswer

Entry = TypeVar("Entry")
Every = Annotated[tuple[Entry, ...], Field(fail_fast=True)]
NAMED_ID = "token_id:"  # prefix of an id in vLLM's answers
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ServedModel(ServerAnswer):
    """The base model, or an adapter of it."""

    id: str
    root: str | None = None  # the path or name that it was loaded from
    max_model_len: Annotated[int, Field(gt=0)] | None = None  # tokens


class ModelList(ServerAnswer):
    """The answer of /v1/models: the base model first, then the loaded adapters."""

    data: Annotated[Every[ServedModel], Field(min_length=1)]


class TokenLogprob(ServerAnswer):
    """The logprob of a sampled token. `token` is `token_id:N`, as requested; old servers write the token's text. The
    route of token ids gives `token_id`."""

    token: str | None = None
    token_id: TokenId | None = None
    logprob: float

    @property
    def named_id(self) -> str | None:
        """Return the id that it names; None if it names none."""
        if self.token_id is not None:
            return str(self.token_id)
        token = self.token or ""
        return token.removeprefix(NAMED_ID) if token.startswith(NAMED_ID) else None


class Logprobs(ServerAnswer):
    """The logprobs of a completion's tokens."""

    content: Every[TokenLogprob] | None = None


class Text(ServerAnswer):
    """The text of a completion. It is not used: tiercel decodes the ids itself."""

    content: str | None = None


class CompletionChoice(ServerAnswer):
    """One completion of a prompt."""

    index: Annotated[int, Field(ge=0)]
    finish_reason: str | None = None
    message: Text | None = None
    token_ids: Every[TokenId] | None = None
    logprobs: Logprobs | None = None


class WordLogprob(ServerAnswer):
    """The logprob of a word at a place of the prompt."""

    logprob: float


class Completions(ServerAnswer):
    """The answer of /v1/chat/completions, and of /inference/v1/generate."""

    model: str
    choices: Every[CompletionChoice]
    prompt_token_ids: Every[TokenId] | None = None
    prompt_logprobs: Every[dict[TokenId, WordLogprob] | None] | None = None  # by token id; None: the first token


class ErrorDetail(ServerAnswer):
    """The message of an error."""

    message: str


class Refusal(ServerAnswer):
    """The answer of an error, in the forms of all versions of vLLM and of the libraries below it."""

    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: str | None = None

    def words(self) -> str | None:
        """Return the message, if there is one."""
        if isinstance(self.error, ErrorDetail):
            return self.error.message
        return self.error or self.message or self.detail

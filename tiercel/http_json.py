"""Answers over HTTP from a side that is not trusted, a vLLM server or a judge: one bounded, typed reading for all.

An answer is bounded in seconds and bytes, is UTF-8 and not compressed, and is read into a strict, frozen model: a
number is finite, and is neither text nor a boolean. Pydantic's parser bounds the nesting. Nothing of an answer is
decoded before that.
"""

import asyncio
import os
import re
import reprlib
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from tiercel.reliability.redaction import redact

CONNECT_SECONDS = 10.0
LONGEST_SHOWN = 300  # characters of an answer in a message
_CHARSET = re.compile(r"charset\*?\s*=\s*[\"']?([^\s;\"']+)", re.IGNORECASE)
_UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")


class NoAnswer(Exception):
    """No whole answer came in time, or what came is no JSON, as a proxy's page is none."""


class WrongAnswer(Exception):
    """A whole answer came that the protocol does not have; the text names the field and what stood there."""


class Answer(BaseModel):
    """What the other side may say. Fields that a model does not name are left out."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


AnswerType = TypeVar("AnswerType", bound=Answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A whole answer, still in bytes."""

    status: int
    body: bytes
    obstacle: str | None  # why its body is not read as JSON: the header that says so

    def read(self, form: type[AnswerType]) -> AnswerType:
        """Raises WrongAnswer where a field is of another type or out of its range, NoAnswer where it is no JSON."""
        if self.obstacle is not None:
            raise WrongAnswer(self.obstacle)
        try:
            return form.model_validate_json(self.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise NoAnswer(f"answered with something that is not JSON ({first['msg']}): {self.text()!r}")
        raise WrongAnswer(f"{_path(first['loc'])}: {brief(first['input'])} came; {first['msg']}")

    def text(self) -> str:
        """The beginning of the body, for a message."""
        return redact(self.body[: 4 * LONGEST_SHOWN].decode(errors="replace"))[:LONGEST_SHOWN]


def key_of(variable: str) -> str | None:
    """Read a key from the environment; None where the variable is unset or empty. Raises ValueError, without the key,
    where it cannot stand in a header."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} holds characters that no key has; export it anew")
    return key or None


def new_client(**options: Any) -> httpx.AsyncClient:
    """A client for `ask`, which bounds the seconds of an answer itself. A side on this machine or network is asked
    directly, whatever proxy the environment names."""
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, **options)


async def ask(client: httpx.AsyncClient, request: httpx.Request, *, seconds: float, most_bytes: int) -> Reply:
    """The answer to a request, whatever its status. Raises NoAnswer, and WrongAnswer for one that is too long."""
    request.headers["Accept-Encoding"] = "identity"
    try:
        return await asyncio.wait_for(_answer(client, request, most_bytes), seconds)
    except asyncio.TimeoutError as error:
        raise NoAnswer(f"no whole answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        text = str(error)
        raise NoAnswer(f"{type(error).__name__}: {text}" if text else type(error).__name__) from error


async def _answer(client: httpx.AsyncClient, request: httpx.Request, most_bytes: int) -> Reply:
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most_bytes:
                raise WrongAnswer(f"body: more than {most_bytes:,} bytes came")
    finally:
        await response.aclose()
    return Reply(status=response.status_code, body=bytes(body), obstacle=_obstacle(response.headers))


def _obstacle(headers: httpx.Headers) -> str | None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        return f"content-encoding: {brief(encoding)} came; none was asked for"
    named = _CHARSET.search(headers.get("content-type", ""))
    if named is not None and named[1].lower() not in _UTF_8:
        return f"content-type: charset {brief(named[1])} came; JSON is in UTF-8"
    return None


def _path(location: tuple[int | str, ...]) -> str:
    """As in choices[0].logprobs."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "answer"


def brief(value: object) -> str:
    """A value as a message shows it."""
    return redact(reprlib.repr(value))

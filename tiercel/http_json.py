"""Reading of answers over HTTP from a server that is not trusted: a vLLM server, or a judge.

An answer has a limit of seconds and of bytes. It must be UTF-8 and not compressed. It is read into a strict, frozen
model: a number must be finite, and neither text nor a boolean is accepted as a number. Pydantic's parser limits the
depth of nesting. No part of an answer is decoded before these checks.
"""

import asyncio
import ipaddress
import os
import re
import reprlib
import ssl
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.request import getproxies_environment, proxy_bypass

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from tiercel.log import logger
from tiercel.reliability.redaction import redact, redact_values

T = TypeVar("T")
CONNECT_SECONDS = 10.0
LONGEST_SHOWN = 300  # characters of an answer in a message
_SEARCHED = 1 << 16  # bytes searched for secrets, because the shown part must not end inside one
_CHARSET = re.compile(r"charset\*?\s*=\s*[\"']?([^\s;\"']+)", re.IGNORECASE)
_UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")


def run_requests(requests: Coroutine[Any, Any, T]) -> T:
    """Run requests to their end, in a thread of their own if an event loop runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(requests)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, requests).result()


class NoAnswer(Exception):
    """Raised if no complete answer came in time, or if the answer is not JSON, such as the error page of a proxy."""


class WrongAnswer(Exception):
    """Raised if a complete answer breaks the protocol. The text names the field and its value."""


class ServerAnswer(BaseModel):
    """The base of models of answers. Fields that a model does not name are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


AnswerType = TypeVar("AnswerType", bound=ServerAnswer)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpReply:
    """A complete answer in bytes."""

    status: int
    body: bytes
    obstacle: str | None  # why the body cannot be read as JSON, according to its headers; None: it can

    def read(self, form: type[AnswerType]) -> AnswerType:
        """Read the body as JSON into `form`. Raises WrongAnswer if a field has the wrong type or is out of range, and
        NoAnswer if the body is not JSON."""
        if self.obstacle is not None:
            raise WrongAnswer(self.obstacle)
        try:
            return form.model_validate_json(self.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise NoAnswer(f"answered with something that is not JSON ({first['msg']}): {self.text()!r}")
        raise WrongAnswer(f"{_path(first['loc'])}: got {brief(first['input'])}; {first['msg']}")

    def text(self) -> str:
        """Return the beginning of the body, for a message."""
        return redact(self.body[:_SEARCHED].decode(errors="replace"))[:LONGEST_SHOWN]


def key_of(variable: str) -> str | None:
    """Return the key in an environment variable, or None if the variable is unset or empty. Raises ValueError if the
    key cannot be part of a header. The message does not show the key."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} has characters that are not allowed in a key; export it again")
    return key or None


@cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates that are trusted. Reading them takes as long as several requests."""
    return httpx.create_ssl_context(trust_env=False)


def new_client(**options: Any) -> httpx.AsyncClient:
    """Return a client for `ask`, which itself limits the seconds of an answer. The environment's proxies and
    certificates are ignored, because the server is on this machine or in its network; `environment_options` has them
    for any other."""
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    known = {"verify": _certificates(), **options}
    return httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, **known)


def environment_options(address: str) -> dict[str, Any]:
    """Return the options of a client that asks an https address as the environment says: through HTTPS_PROXY, unless
    NO_PROXY names the host or it is this machine, and with the certificates of SSL_CERT_FILE, SSL_CERT_DIR or
    REQUESTS_CA_BUNDLE. There are none for an http address, whose key a proxy would see. What cannot be used is logged
    and left out. Raises ValueError if the proxy is not an address. No message shows it, because it may contain a
    password."""
    url, found = httpx.URL(address), dict[str, Any]()
    if url.scheme != "https":
        return found
    proxy = getproxies_environment().get("https")
    if proxy and not _is_asked_directly(url):
        scheme, _, place = proxy.partition("://") if "://" in proxy else ("http", "", proxy)
        if scheme.lower() in ("http", "https"):
            found["proxy"] = _proxy_address(f"{scheme.lower()}://{place}")
        else:
            logger.warning("HTTPS_PROXY does not begin with http:// or https://; the judge is asked without a proxy")
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        if path := os.environ.get(variable):
            folders = os.pathsep.join(filter(os.path.isdir, path.split(os.pathsep))) or None
            try:
                context = ssl.create_default_context(cafile=None if folders else path, capath=folders)
                return {**found, "verify": context}
            except OSError as error:
                logger.warning(f"{variable} is {path}, which has no readable certificates and is left out: {error}")
    return found


def _is_asked_directly(url: httpx.URL) -> bool:
    """Say whether an address is of this machine, or in NO_PROXY with or without its port."""
    try:
        is_own = ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        is_own = url.host == "localhost"
    return is_own or any(map(proxy_bypass, (url.host, url.netloc.decode(), f"{url.host}:{url.port or 443}")))


def _proxy_address(proxy: str) -> str:
    try:
        url = httpx.URL(proxy)
        if url.host and 0 < (url.port or 80) < 1 << 16:
            return proxy
    except (httpx.InvalidURL, ValueError):
        pass
    raise ValueError("HTTPS_PROXY is not the address of a proxy, such as http://proxy:3128; export it again") from None


async def ask(client: httpx.AsyncClient, request: httpx.Request, *, seconds: float, most_bytes: int) -> HttpReply:
    """Send a request and return the answer, whatever its status. Raises NoAnswer if none came in time, and WrongAnswer
    if the answer is longer than `most_bytes`."""
    request.headers["Accept-Encoding"] = "identity"
    answer = asyncio.create_task(_answer(client, request, most_bytes))
    try:  # asyncio.wait_for of Python 3.11 loses a cancellation that comes together with the answer
        done, _ = await asyncio.wait([answer], timeout=seconds)
        if not done:
            raise NoAnswer(f"no complete answer within {seconds:g} s")
        return answer.result()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        text = str(error)
        raise NoAnswer(f"{type(error).__name__}: {text}" if text else type(error).__name__) from error
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)  # the connection is free again when this returns


async def _answer(client: httpx.AsyncClient, request: httpx.Request, most_bytes: int) -> HttpReply:
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most_bytes:
                raise WrongAnswer(f"body: got more than {most_bytes:,} bytes")
    finally:
        await response.aclose()
    return HttpReply(status=response.status_code, body=bytes(body), obstacle=_obstacle(response.headers))


def _obstacle(headers: httpx.Headers) -> str | None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        return f"content-encoding: {brief(encoding)} came; none was asked for"
    named = _CHARSET.search(headers.get("content-type", ""))
    if named is not None and named[1].lower() not in _UTF_8:
        return f"content-type: charset {brief(named[1])} came; JSON is in UTF-8"
    return None


def _path(location: tuple[int | str, ...]) -> str:
    """Format a location, as in choices[0].logprobs."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "answer"


def brief(value: object) -> str:
    """Shorten a value for a message, without secrets. These are removed first, because a value may be cut inside
    one."""
    return redact(reprlib.repr(redact_values(value)))

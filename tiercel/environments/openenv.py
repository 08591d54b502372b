"""An environment on a server of OpenEnv, as the class that a process of an environment serves.

A trajectory is a session of the server: one WebSocket, with a message for `reset` and one for each action. The server's
tools are the policy's tools; a server without tools has one, `step`, whose arguments are the fields of its action.
Only the host that the recipe names is asked: redirections and the environment's proxies are not followed.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from tiercel.environments.answer_parts import UnusableAnswer
from tiercel.http_json import HttpReply, NoAnswer, ServerAnswer, WrongAnswer, ask, new_client
from tiercel.user_functions import OPENENV

CONNECT_SECONDS = 10.0
WAITS = (0.2, 1.0, 3.0)  # seconds before another attempt to begin a session; an action is never sent twice
LARGEST_MESSAGE = 128 << 20  # bytes
LARGEST_SCHEMA = 1 << 20  # bytes
OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of errors that the policy has caused
FULL = "CAPACITY_REACHED"
_PICTURE = "data:image/"


class OpenEnvFailure(UnusableAnswer):
    """Raised if the server cannot begin or continue a trajectory."""


class NoSession(OpenEnvFailure):
    """Raised if the server is away or full."""


class RefusedAction(ValueError):
    """Raised if the server refuses an action; the policy is told the message."""


class Schemas(ServerAnswer):
    """A server's answer to /schema."""

    action: dict[str, Any]


class OpenEnv:
    """A server's environment, one trajectory at a time. The reward is the sum of those of the trajectory's steps."""

    def __init__(self, environment: str):
        """`environment` is as the recipe has it, such as openenv:http://127.0.0.1:8000. Asks the server for its tools.
        Raises OpenEnvFailure."""
        self._url = environment.removeprefix(OPENENV).rstrip("/")
        self._session: ClientConnection | None = None
        self._ending = ExitStack()  # closes the session
        self.done = False
        self._reward: float | None = None
        self._tools = self._found_tools()

    def reset(self, **row: Any) -> list[dict[str, Any]] | None:
        """Begin a session with the row's columns. Every sample of a row begins with the same seed: the column `seed`,
        or a function of the row's id."""
        self._end()
        given = {name: value for name, value in row.items() if name != "images" and value is not None}
        seed = int.from_bytes(hashlib.sha256(str(row.get("id")).encode()).digest()[:4], "big") >> 1
        self.done, self._reward = False, None
        try:
            observation = self._begin("reset", {"seed": seed, **given})
        except RefusedAction as error:
            raise OpenEnvFailure(f"{self._url} refused reset: {error}") from error
        return answer_of(observation) or None

    def get_reward(self) -> float | None:
        """Return the sum of the rewards, or None if there was none, and end the session."""
        self._end()
        return self._reward

    def functions(self) -> list[Callable[..., Any]]:
        """Return a function for each tool, with its schema as `json_schema`."""
        return [self._function(schema) for schema in self._tools]

    def _function(self, schema: Mapping[str, Any]) -> Callable[..., Any]:
        name = schema["function"]["name"]

        def call(**arguments: Any) -> list[dict[str, Any]]:
            of_tool = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            return answer_of(self._answer("step", arguments if self._has_one_action else of_tool))

        call.__name__ = name
        call.json_schema = schema  # type: ignore[attr-defined]
        return call

    def _found_tools(self) -> list[dict[str, Any]]:
        action = self._action_schema()
        fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
        self._has_one_action = bool(fields) and "tool_name" not in fields  # otherwise it is a call of a tool
        if self._has_one_action:
            text = action.get("description") or "Act in the environment."
            return [_tool("step", text, {**action, "properties": fields})]
        try:
            tools = self._begin("step", {"type": "list_tools"})["tools"]
            return [_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]
        except (RefusedAction, KeyError, TypeError) as error:
            raise OpenEnvFailure(f"{self._url} lists no tools: {error}") from error
        finally:
            self._end()

    def _action_schema(self) -> dict[str, Any]:
        try:
            reply = asyncio.run(self._asked("/schema"))
            if reply.status != httpx.codes.OK:
                raise NoAnswer(f"status {reply.status}: {reply.text()!r}")
            return reply.read(Schemas).action
        except (NoAnswer, WrongAnswer) as error:
            raise OpenEnvFailure(f"{self._url}/schema is no answer of an OpenEnv server: {error}") from error

    async def _asked(self, path: str) -> HttpReply:
        async with new_client() as client:
            request = client.build_request("GET", f"{self._url}{path}")
            return await ask(client, request, seconds=CONNECT_SECONDS, most_bytes=LARGEST_SCHEMA)

    def _begin(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session with its first message, and try again if the server is away or full for a moment."""
        for wait in (*WAITS, None):
            try:
                self._session = self._ending.enter_context(self._connection())
                return self._answer(kind, data)
            except NoSession as error:
                reason = error
            if wait is not None:
                time.sleep(wait)
        raise OpenEnvFailure(
            f"{self._url} began no session in {len(WAITS) + 1} tries: {reason}; start the server, with "
            "max_concurrent_envs for all completions of a step"
        )

    @contextmanager
    def _connection(self) -> Iterator[ClientConnection]:
        """Connect to the recipe's own host. Raises NoSession."""
        place = urlsplit(self._url)
        target = place.hostname or "", place.port or (443 if place.scheme == "https" else 80)
        address = f"ws{self._url.removeprefix('http')}/ws"
        with ExitStack() as stack:
            try:
                given = socket.create_connection(target, CONNECT_SECONDS)  # on one that is given, none is redirected
                given.settimeout(None)
                opening = connect(
                    address, sock=given, open_timeout=CONNECT_SECONDS, max_size=LARGEST_MESSAGE, proxy=None
                )
                session = stack.enter_context(opening)
            except (OSError, ValueError, WebSocketException) as error:  # ValueError: a redirection
                raise NoSession(f"{type(error).__name__}: {error}") from error
            yield session

    def _answer(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the observation that it is answered with. Raises RefusedAction and
        OpenEnvFailure."""
        if self._session is None:
            raise OpenEnvFailure(f"{self._url}: the session has ended")
        try:
            with suppress(ConnectionClosed):  # a server that is full says so and closes before it is asked
                self._session.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._session.recv())
            found = answer["data"]
            if answer["type"] != "error":
                self.done = bool(found["done"])
                if (reward := found["reward"]) is not None:
                    self._reward = (self._reward or 0.0) + float(reward)
                return dict(found["observation"])
            code, text = found["code"], _error_text(found)
        except (OSError, WebSocketException) as error:
            self._end()
            raise NoSession(f"{self._url} ended the session: {type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OpenEnvFailure(f"{self._url} answered {kind} with no message of OpenEnv: {error}") from error
        if code in OF_THE_ACTION:
            raise RefusedAction(text)
        self._end()
        raise (NoSession if code == FULL else OpenEnvFailure)(f"{self._url}: {code}: {text}")

    def _end(self) -> None:
        self._session = None
        self._ending.close()


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _error_text(found: Mapping[str, Any]) -> str:
    """Return what an error says, with each wrong field of an action."""
    wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found.get("errors", ())]
    return "; ".join(wrong) or str(found["message"])


def answer_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an observation as parts of an answer. Of a tool's result they are its contents. Otherwise a single text is
    given as it is, several fields as JSON, and then the pictures, which are data URLs. Raises RefusedAction if a tool
    has failed."""
    if (error := observation.get("error")) is not None and "tool_name" in observation:
        raise RefusedAction(str(error["message"]))
    result = observation["result"] if "tool_name" in observation else observation
    if isinstance(result, Mapping) and isinstance(contents := result.get("content"), list):
        return [_content(part) for part in contents]
    if not isinstance(result, Mapping):
        return [_text(result)]
    fields = {name: value for name, value in result.items() if name != "metadata" and value not in (None, "", [], {})}
    pictures = {name: value for name, value in fields.items() if isinstance(value, str) and value.startswith(_PICTURE)}
    rest = {name: value for name, value in fields.items() if name not in pictures}
    texts = [_text(next(iter(rest.values())) if len(rest) == 1 else rest)] if rest else []
    return [*texts, *(_picture(value.partition(",")[2]) for value in pictures.values())]


def _content(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a content of MCP: a text, a picture, or anything else as JSON."""
    if part.get("type") == "image":
        return _picture(part["data"])
    return _text(part["text"] if part.get("type") == "text" else part)


def _text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def _picture(data: str) -> dict[str, Any]:
    try:
        return {"type": "image", "image": base64.b64decode(data, validate=True)}
    except (binascii.Error, TypeError) as error:
        raise OpenEnvFailure(f"a picture of an observation is not in base64: {error}") from error

"""The process of one trajectory. It holds the user's environment and tools, and answers one request after another.

It is forked by sandbox/supervisor.py. Pictures leave it as files in base64. It imports no torch unless the user's code
does, or it has to describe the tools, whose schemas transformers makes.
"""

import asyncio
import base64
import inspect
import io
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from tiercel.calls import CannotLoad, load_module
from tiercel.rewards.runtime.worker import Handle, Reply, checked_value, failure_text, load_named, serve

LONGEST_TEXT = 1 << 20  # characters of an answer
LARGEST_PICTURES = 64 << 20  # bytes of an answer's pictures
MODULE_PREFIX = "tiercel_environment"
NO_TOOLS = ("reset", "get_reward", "respond", "fork")


class UnusableAnswer(ValueError):
    """Raised if the answer of the user's code cannot be handed to the policy."""


def run(descriptor: int, work: Mapping[str, Any], file_mb: float) -> None:
    """Serve an object of the class that `environment` names, if any, and the functions that `functions` name."""
    serve(descriptor, partial(_load, work["environment"], work["functions"]), file_mb)


def _load(environment: str | None, functions: list[str]) -> Handle:
    load = cache(partial(load_module, prefix=MODULE_PREFIX))  # one module for everything in a file
    found = [load_named(call, load) for call in functions]
    if wrong := [f"{source}: {name} is no function" for source, name, each in found if not inspect.isfunction(each)]:
        raise CannotLoad("; ".join(wrong))
    tools = [function for _, _, function in found]
    if environment is None:
        return Host(None, tools).handle
    source, name, kind = load_named(environment, load)
    if not inspect.isclass(kind) or not inspect.isfunction(getattr(kind, "reset", None)):
        raise CannotLoad(f"{source}: {name} is no class with a method reset")
    try:
        return Host(kind(), tools).handle
    except BaseException as error:  # of the constructor
        raise CannotLoad(f"{source}: {name} cannot be created:\n{failure_text(error)}") from error


class Host:
    """Answers requests with the user's code. Each method that a request may name returns the fields of the reply."""

    def __init__(self, environment: Any, functions: list[Callable[..., Any]]):
        self.environment = environment
        self.functions = functions
        self.copies = [self]  # by their numbers in requests
        members = inspect.getmembers(type(environment), inspect.isfunction) if environment is not None else []
        names = [name for name, _ in members if name not in NO_TOOLS and not name.startswith("_")]
        self.tools = [*functions, *(getattr(environment, name) for name in names)]
        self._loop = asyncio.new_event_loop()

    def handle(self, request: Any, reply: Reply) -> None:
        """Answer a request, whatever the user's code does."""
        try:
            host = self.copies[request.get("copy", 0)]
            fields = getattr(host, request["ask"])(**request["fields"])
        except UnusableAnswer as error:
            fields = {"failure": str(error)}
        except BaseException as error:  # whatever the user's code raises
            fields = {"failure": failure_text(error)}
        reply(number=request["number"], **fields)

    def describe(self) -> dict[str, Any]:
        """Return the schema of each tool, or why it has none, and which optional methods exist."""
        from transformers.utils import get_json_schema

        schemas, problems = [], []
        for tool in self.tools:
            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:  # such as for its hints or its docstring
                problems.append(f"tool {tool.__name__}: {error}")
        has = partial(hasattr, self.environment)
        abilities = {"responds": has("respond"), "gives_reward": has("get_reward"), "forks": has("fork")}
        return {"schemas": schemas, "problems": problems, **abilities}

    def reset(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Start a trajectory on a row, and drop copies. `seed` is passed if the method has a parameter of that name."""
        del self.copies[1:]
        parameters = inspect.signature(self.environment.reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            row = {name: value for name, value in {"seed": seed, **row}.items() if name in parameters}
        elif "seed" in parameters:
            row = {"seed": seed, **row}
        return self._answered(self._result(self.environment.reset(**row)), may_be_none=True)

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool. Its errors become an answer to the policy, except KeyboardInterrupt and similar ones."""
        tool = next(tool for tool in self.tools if tool.__name__ == name)
        try:
            inspect.signature(tool).bind(**arguments)
            value = self._result(tool(**arguments))
        except Exception as error:
            text = f"{error}"[:LONGEST_TEXT] or type(error).__name__
            return {"error": text, "is_done": self._is_done()}
        return self._answered(value)

    def respond(self, completion: str) -> dict[str, Any]:
        """Answer a turn of a dialogue."""
        return self._answered(self._result(self.environment.respond(completion)), may_be_none=True)

    def fork(self) -> dict[str, Any]:
        """Copy the environment, and return the number of the copy."""
        made = None
        if self.environment is not None:
            made = self._result(self.environment.fork())
            if made is self.environment or not isinstance(made, type(self.environment)):
                what = "itself" if made is self.environment else f"a {type(made).__name__}"
                raise UnusableAnswer(f"returned {what}; return a copy, such as copy.deepcopy(self)")
        copy = Host(made, self.functions)
        copy.copies = self.copies
        self.copies.append(copy)
        return {"copy": len(self.copies) - 1}

    def get_reward(self) -> dict[str, Any]:
        """Return the trajectory's reward."""
        return checked_value(self._result(self.environment.get_reward()))

    def _result(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def _answered(self, value: Any, *, may_be_none: bool = False) -> dict[str, Any]:
        parts = None if value is None and may_be_none else _parts(value)
        return {"parts": parts, "is_done": self._is_done()}

    def _is_done(self) -> bool:
        done = getattr(self.environment, "done", False)
        return not callable(done) and bool(done)


def _parts(value: Any) -> list[dict[str, str]]:
    """Convert an answer to parts, each {"text": ...} or {"image": base64}. Raises UnusableAnswer."""
    is_list = isinstance(value, list | tuple) and all(isinstance(part, Mapping) and "type" in part for part in value)
    given = value if is_list and value else [{"type": _kind(value), _kind(value): value}]
    parts = [_part(part) for part in given]
    texts = sum(len(part.get("text", "")) for part in parts)
    if texts > LONGEST_TEXT:
        raise UnusableAnswer(f"answered a text of {texts:,} characters; at most {LONGEST_TEXT:,} are taken")
    pictures = sum(len(part.get("image", "")) for part in parts) * 3 // 4
    if pictures > LARGEST_PICTURES:
        raise UnusableAnswer(f"answered pictures of {pictures:,} bytes; at most {LARGEST_PICTURES:,} are taken")
    return parts


def _kind(value: Any) -> str:
    return "image" if isinstance(value, bytes) or type(value).__module__.startswith("PIL.") else "text"


def _part(part: Mapping[str, Any]) -> dict[str, str]:
    kind = part["type"]
    if kind not in ("text", "image") or kind not in part:
        raise UnusableAnswer(
            f"answered a part with the type {kind!r} and the keys {sorted(map(str, part))}; a part is "
            '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
        )
    value = part[kind]
    return {"text": str(value)} if kind == "text" else {"image": base64.b64encode(_file(value)).decode()}


def _file(picture: Any) -> bytes:
    """Return a picture as the bytes of a file. Bytes are returned as they are."""
    if isinstance(picture, bytes):
        return picture
    if _kind(picture) != "image":
        raise UnusableAnswer(
            f"answered a {type(picture).__name__} as a picture; give a PIL image, or the bytes of a file"
        )
    stream = io.BytesIO()
    picture.save(stream, "PNG", compress_level=1)
    return stream.getvalue()

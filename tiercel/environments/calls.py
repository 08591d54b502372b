"""The tool calls in what the policy wrote, read by transformers' parser of responses.

A tokenizer may bring a template for that parser. For others, the template follows from the form that the chat template
or the recipe's system message shows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from tiercel.errors import ModelError
from tiercel.models.families.base import Family
from tiercel.reward_types import ToolCall

# The errors of the parser on what a model may write.
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_LONGEST_REASON = 200  # characters
# The part of the prompt that belongs to the policy's turn: nothing, or the opening of its thoughts.
_OWN_START = r"(?s)\A.*?(?=(?:<think>\s*)?\Z)"
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}  # built from what the expressions found


class Malformed(ValueError):
    """Raised if a turn has a tool call that cannot be read; the policy is told the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """A way to write tool calls. `response_template` is as transformers documents it."""

    sign: str  # what a chat template in this form contains
    start: str  # what begins a call
    response_template: dict[str, Any]


def _form(sign: str, start: str, opening: str, close: str, **call: Any) -> CallForm:
    """Build a form with two regular expressions around each call, and JSON between them unless `call` says
    otherwise."""
    calls = {"open_pattern": opening, "close_pattern": close, "repeats": True, "content": "json", "transform": _NAMED}
    fields = {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {**calls, **call},
        "content": {},
    }
    return CallForm(sign=sign, start=start, response_template={"start_anchor_pattern": _OWN_START, "fields": fields})


def _tags(parameter: str) -> dict[str, Any]:
    """Return the options of a form with each parameter in its own tags, as text that the tool's schema gives a type."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": parameter}}


# The first form whose sign is found is used.
FORMS = (
    _form(
        "<function=",
        "<tool_call>",
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "</tool_call>",
        **_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    _form(
        "<arg_key>",
        "<tool_call>",
        r"<tool_call>(?P<name>[^\s<]+)",
        "</tool_call>",
        **_tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    ),
    _form(
        "<|tool_call>call:",
        "<|tool_call>",
        r"<\|tool_call>call:(?P<name>\w+)",
        r"<tool_call\|>",
        content_args={"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
    ),
    _form("[ARGS]", "[TOOL_CALLS]", r"\[TOOL_CALLS\](?P<name>[^\[\s]+)\[ARGS\]", r"(?=\[TOOL_CALLS\])|\Z"),
    _form("[TOOL_CALLS]", "[TOOL_CALLS]", r"\[TOOL_CALLS\]", r"\Z", transform=None),
    _form("<tool_call>", "<tool_call>", "<tool_call>", "</tool_call>", transform=None),
)


class CallReader:
    """A reader of the tool calls in turns."""

    def __init__(self, family: Family, system: str | None, schemas: Sequence[Mapping[str, Any]]):
        """`system` is the recipe's system message. Raises ModelError if nothing shows the form of tool calls."""
        own: Any = getattr(family.tokenizer, "response_template", None)
        shown = family.checkpoint.chat_template + (system or "")
        form = next((form for form in FORMS if form.sign in shown), None)
        if own is None and form is None:
            raise ModelError(
                f"data.template: the chat template of {family.checkpoint.path} writes no tool calls in a form that "
                "tiercel knows; give one that does, or a data.system that describes the tools and shows a call as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
            )
        self._schemas: list[Any] = [dict(schema) for schema in schemas]
        self._start = None if form is None else form.start
        self._template = load_response_template(own if form is None else own or form.response_template)

    def read(self, text: str, prompt: str) -> tuple[ToolCall, ...]:
        """Return the calls of a turn after a rendered prompt. Raises Malformed if one cannot be read; then none may be
        made."""
        try:
            message = parse_response(text, self._template, prefix=prompt, tools=self._schemas)
            calls = message.get("tool_calls") or []
            found = tuple(_tool_call(each) for call in calls for each in (call if isinstance(call, list) else [call]))
        except _FAULTS as error:
            reason = f"{error}".rpartition("Error: ")[2][:_LONGEST_REASON]  # the parser repeats the call before it
            raise Malformed(f"the tool call cannot be read: {reason}") from error
        if self._start is not None and self._start in message.get("content", ""):
            raise Malformed(f"what follows {self._start} is no tool call")
        return found


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    name, arguments = (function.get(key) if isinstance(function, dict) else None for key in ("name", "arguments"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('it must be an object with a text "name" and an object "arguments"')
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # no NaN, no halves of surrogate pairs
    return ToolCall(name=name.strip(), arguments=arguments)

"""Variables of a chat template, such as `enable_thinking`, set in the template itself.

So every use of the template has them: rows of SFT, prompts that are sampled, evaluation, and the template of an export,
where a server's own arguments still win.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from tiercel.config_base import shown
from tiercel.errors import ModelError

KEY = "data.template_arguments"
GIVEN_BY_TIERCEL = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag that transformers adds


def with_arguments(template: str, arguments: Mapping[str, Any]) -> str:
    """Return a template in which these variables have these values, unless they are given otherwise. Raises ModelError
    for a variable that the template does not read, which would change nothing."""
    if not arguments:
        return template
    known = variables_of(template)
    if unknown := sorted(arguments.keys() - known):
        there = ", ".join(sorted(known)) or "none"
        raise ModelError(
            f"{KEY}.{unknown[0]}: the chat template has no variable of this name; its variables are: {there}"
        )
    lines = [f"{{% set {name} = {name} if {name} is defined else {_literal(arguments[name])} %}}" for name in arguments]
    return "".join(lines) + template


def variables_of(template: str) -> set[str]:
    """List the variables that a template reads, beside those that are always given. Raises ModelError for a template
    that Jinja cannot parse."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid Jinja: {error}") from error
    return meta.find_undeclared_variables(parsed) - GIVEN_BY_TIERCEL - {"raise_exception", "strftime_now"}


def _literal(value: Any) -> str:
    """Write a value as Jinja has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return json.dumps(value)
    raise ModelError(f"{KEY}: {shown(value)} is not a text, a number, true or false")

"""Explain what is wrong with a recipe in plain words: translate pydantic's errors, one line for each problem."""

from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from tiercel.config.keys import ENTRY, OWN_SECTIONS, Key, allowed_words, declared_name, keys_of, named, type_in_words
from tiercel.config.schema import Kind
from tiercel.config.suggestions import Suggestion, nearest_key, nearest_word
from tiercel.config.yaml_text import leaves
from tiercel.config_base import LIST_FORM, SECTION_FORM, TEXT_FORM, Keys, Problem, Problems, shown
from tiercel.rewards.registry import BY_NAME, CALL, TAGS, lowered, takers
from tiercel.secret_names import harmless
from tiercel.user_functions import is_call

# Pydantic's marks that tell which of several sections a location is in.
FORMS = {TEXT_FORM, SECTION_FORM, LIST_FORM, *TAGS}


def schema_problems(error: ValidationError, kind: Kind) -> list[Problem]:
    """Translate each of pydantic's errors to a line: the key, the value given, what is wrong, and what to write
    instead."""
    # A list that has entries is too short because they are wrong, and each is reported by itself.
    told = [each for each in error.errors(include_url=False) if each["type"] != "too_short" or not each["input"]]
    return [problem for details in told for problem in _translate(details, kind)]


def location_of(details: ErrorDetails) -> tuple[int | str, ...]:
    """List the keys and entry numbers that lead to the fault."""
    return tuple(part for part in details["loc"] if part not in FORMS)


def dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _translate(details: ErrorDetails, kind: Kind) -> Problems:
    path = dotted(location_of(details))
    if not path:
        yield Keys("recipe").problem("is nested too deeply; a recipe has sections with keys")
        return
    is_declared = declared_name(path) in keys_of(kind)
    if details["type"] == "extra_forbidden" and is_declared and "." in str(details["loc"][-1]):
        section, _, leaf = path.rpartition(".")
        value = shown(details["input"], key=leaf)
        yield Keys(path).problem(f"a key of a file has no dots; write {leaf}: {value} below {section}:")
    elif details["type"] == "extra_forbidden" and is_declared:
        yield Keys(path).problem(_of_other_rewards(details))
    elif details["type"] == "extra_forbidden":
        for leaf, value in leaves(details["input"], path):
            suggestion = nearest_key(leaf)
            note = f" (its value is {shown(value, key=leaf)})" if value is not None else ""
            text = f"unknown key{note}; {_instead(suggestion, leaf, kind)}"
            yield Keys(leaf, *((suggestion.key,) if suggestion.key else ())).problem(text)
    elif details["type"] == "missing" and is_declared:
        yield Keys(path).problem(_missing(details, path, kind))
    else:
        key, value = _key_of(path, kind), details["input"]
        given = "has no value, but " if value is None else f"is {shown(value, key=_secret_part(key))}, but "
        reason = EXPLANATIONS.get(details["type"], _wrong_value)(details, key)
        yield Keys(path).problem(f"{given}{reason}")


def _secret_part(key: Key) -> str:
    """Return the part of a declared key's name that marks its value as a secret: the key of a judge is one, whereas
    keys with `token` in their names are numbers of tokens."""
    return key.leaf if key.leaf == "key" else ""


def _key_of(path: str, kind: Kind) -> Key:
    """Return the key at a location; for an item of a list of plain values, the key of the list."""
    keys = keys_of(kind)
    name = declared_name(path)
    while name not in keys:
        name = name.rpartition(".")[0]
    return keys[name]


def _reward_name(details: ErrorDetails) -> str | None:
    """Return the name of the reward whose own key is at fault, "call" for a reward of your own; None for any other
    key."""
    tags = [part for part in details["loc"] if part in TAGS]
    return str(tags[0]).strip("()") if tags else None


def _of_other_rewards(details: ErrorDetails) -> str:
    """Explain that the key belongs to other rewards."""
    name = _reward_name(details)
    named = "a reward by call" if name == CALL else f"the reward {name}"
    takers_of_it = ", ".join(takers(str(details["loc"][-1])))
    return f"is not a key of {named}; remove it (it belongs to {takers_of_it})"


def _missing(details: ErrorDetails, path: str, kind: Kind) -> str:
    if path == "rewards":
        return (
            "is required; a GRPO recipe needs at least one reward to score completions, such as rewards: [{name: "
            "exact}] (for supervised fine-tuning, use `tiercel sft`)"
        )
    key = keys_of(kind)[declared_name(path)]
    if key.parent == f"rewards.{ENTRY}" and (name := _reward_name(details)) is not None:
        meaning = lowered(BY_NAME[name].meanings()[key.leaf]).partition(";")[0]
        return f"is required; the reward {name} needs {meaning.rstrip('.')}"
    if key.section is not None:
        required = [name for name, field in key.section.model_fields.items() if field.is_required()]
        if not required and path != "train":
            return f"is required; `{path}: {{}}` takes its defaults"
        return f"is required; add the section with {', '.join(required) or 'steps or epochs'}"
    meaning = " ".join((key.meaning or type_in_words(key.field)).split()).partition(";")[0].rstrip(".")
    return f"is required; give {meaning[0].lower()}{meaning[1:]}"


def _instead(suggestion: Suggestion, path: str, kind: Kind) -> str:
    """Say what to write instead of the unknown key `path`."""
    if suggestion.key is None:
        return suggestion.hint or _known_keys(path, kind)
    if declared_name(suggestion.key) not in keys_of(kind):
        own = {key.leaf: key.path for key in keys_of(kind).values() if key.parent in OWN_SECTIONS[kind]}
        leaves = [name.rpartition(".")[2] for name in (path, suggestion.key)]
        if (leaf := next((leaf for leaf in leaves if leaf in own), None)) is not None:
            return f"use {own[leaf]}"
        section = suggestion.key.partition(".")[0]
        verb = next((kind for kind, sections in OWN_SECTIONS.items() if section in sections), "grpo")
        text = f"it would be {suggestion.key}, but {named(kind)} recipe has no section {section}"
        return f"{text}; remove it, or use `tiercel {verb}`"
    return f"use {suggestion.key} ({suggestion.hint})" if suggestion.hint else f"use {suggestion.key}"


def _known_keys(path: str, kind: Kind) -> str:
    keys = keys_of(kind).values()
    section = declared_name(path.rpartition(".")[0])
    if section and (names := [key.leaf for key in keys if key.parent == section]):
        return f"the keys of {section} are {', '.join(names)}"
    return f"the sections are {', '.join(key.leaf for key in keys if not key.parent)}"


def _whole_number(details: ErrorDetails, key: Key) -> str:
    value = details["input"]
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return f"must be a whole number, not text; use {value.strip()} without quotes"
    if isinstance(value, float) and value.is_integer():
        return f"must be a whole number; use {int(value)}"
    return _wrong_value(details, key)


def _number(details: ErrorDetails, key: Key) -> str:
    value = details["input"]
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return f"must be a number, not text; use {value} without quotes"
    return _wrong_value(details, key)


def _finite_number(details: ErrorDetails, key: Key) -> str:
    return f"must be a finite {type_in_words(key.field)}"


def _boolean(details: ErrorDetails, key: Key) -> str:
    word = shown(details["input"]).strip('"').lower()
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(word)
    return f"must be true or false; use {meant}" if meant else _wrong_value(details, key)


def _text(details: ErrorDetails, key: Key) -> str:
    value = details["input"]
    if key.path == "data.eval":
        return "must be a file of rows or a list of files, or {fraction: 0.01} or {count: 100} of the training rows"
    if isinstance(value, bool | int | float):
        return f'must be text; put it in quotes: "{shown(value, key=_secret_part(key))}"'
    if isinstance(value, list) and key.path == "lora.targets":
        names = "|".join(str(item) for item in value)
        return f'must be one word or one regular expression, such as ".*({names})"'
    return _wrong_value(details, key)


def _word(details: ErrorDetails, key: Key) -> str:
    allowed = allowed_words(key.field.annotation)
    choices = f"must be {allowed[0]}" if len(allowed) == 1 else f"must be one of {', '.join(allowed)}"
    given = details["input"]
    if isinstance(given, str) and is_call(given) and key.path in ("algorithm.loss", "algorithm.advantage"):
        return f"a function of your own is written {{call: {given}}}; otherwise it {choices}"
    suggestion = nearest_word(key.path, given if isinstance(given, str) else shown(given), allowed)
    if suggestion.key is not None:
        return f"{choices}; use {suggestion.key}"
    return f"{choices}; {suggestion.hint}" if suggestion.hint else choices


def _section(details: ErrorDetails, key: Key) -> str:
    assert key.section is not None
    keys = ", ".join(key.section.model_fields)
    if details["input"] is None:
        return f"must be a section; leave it out, or set some of its keys ({keys})"
    if key.path == "rewards" and isinstance(details["input"], str):
        return f"must be an entry with keys; use {{name: {harmless(details['input'])}}}, or {{call: file.py:function}}"
    return f"must be a section with the keys {keys}"


def _list(details: ErrorDetails, key: Key) -> str:
    if key.is_list_of_sections:
        return f"must be a list of entries, such as {key.path}: [{{name: exact}}]"
    given = details["input"]
    if isinstance(given, str):
        meant = nearest_word(key.path, given, allowed_words(key.field.annotation)).key
        return f"must be a list; use [{meant or harmless(given)}]"
    return _wrong_value(details, key)


def _too_short(details: ErrorDetails, key: Key) -> str:
    least = details["ctx"]["min_length"]
    if key.path.startswith("data."):
        return f"must have at least {least}; for example, {key.path}: [rows.jsonl]"
    return f"must have at least {least}; for example, {key.path}: [{{name: exact}}]"


def _wrong_length(details: ErrorDetails, key: Key) -> str:
    return f"must be a {type_in_words(key.field)}, such as {shown(key.field.default)}"


def _wrong_value(details: ErrorDetails, key: Key) -> str:
    words = type_in_words(key.field)
    article = "" if words.startswith(("one of", "true")) else "a "
    if details["input"] is None:
        default = key.field.default
        remedy = f"remove the key to get {shown(default)}" if default is not PydanticUndefined else "it has no default"
        return f"must be {article}{words}; {remedy}"
    return f"must be {article}{words}"


EXPLANATIONS: dict[str, Callable[[ErrorDetails, Key], str]] = {
    "int_type": _whole_number,
    "float_type": _number,
    "finite_number": _finite_number,
    "bool_type": _boolean,
    "string_type": _text,
    "literal_error": _word,
    "model_type": _section,
    "tuple_type": _list,
    "too_short": _too_short,
    "too_long": _wrong_length,
    "missing": _wrong_length,
}  # every other error, such as one of bounds, is explained by the type in words

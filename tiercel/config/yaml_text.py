"""Read and write YAML as recipes use it, by the same rules.

Only plain JSON types, following YAML 1.2: `1e-5` is a float, `yes` and `on` are text, dates are text. Underscores may
group the digits of a number. A key that is given twice is a problem, reported with its lines.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

LARGEST_TEXT = 1 << 20  # characters; recipes have thousands, or many more if they list files
MOST_BYTES = 4 * LARGEST_TEXT  # of such a text in UTF-8
MOST_NODES = 100_000  # nodes, counting each as often as aliases repeat it
_MERGE = "tag:yaml.org,2002:merge"
_BOOLEANS = {"true": True, "false": False}
_PATTERNS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    _MERGE: (r"<<", "<"),
}


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Map each first character to the tags that a plain scalar may have, in order, as PyYAML stores them."""
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, (pattern, first_characters) in _PATTERNS.items():
        compiled = re.compile(rf"^(?:{pattern})$")
        for first in [*first_characters, ""] if compiled.match("") else first_characters:
            resolvers.setdefault(first, []).append((tag, compiled))
    return resolvers


class _Fault(yaml.constructor.ConstructorError):
    """YAML that recipes do not use, explained in tiercel's own words."""


def _fault(message: str, node: yaml.Node) -> _Fault:
    return _Fault(None, None, message, node.start_mark)


def _scalar(convert: Callable[[str], Any]) -> Callable[["_Loader", yaml.ScalarNode], Any]:
    def construct(loader: "_Loader", node: yaml.ScalarNode) -> Any:
        try:
            return convert(loader.construct_scalar(node))
        except (ValueError, KeyError) as error:
            raise _fault("not a value of this type", node) from error  # without the value, which may be a secret

    return construct


def _float(text: str) -> float:
    return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


def _is_writable(text: str) -> bool:
    """Return whether the text can be written to a file or terminal: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(text: str) -> str:
    if not _is_writable(text):
        raise ValueError(text)
    return text


class _Loader(yaml.SafeLoader):
    """Constructs only JSON types, and records every key that is given twice."""

    yaml_implicit_resolvers = _implicit_resolvers()

    def __init__(self, text: str):
        super().__init__(text)
        self.problems: list[str] = []

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _fault("expected `key: value` pairs", node)
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or not _is_writable(key.value):
                raise _fault("a key must be a single word", key)
            line = key.start_mark.line + 1
            if key.value in first_line:
                self.problems.append(
                    f"{key.value}: is set twice, on lines {first_line[key.value]} and {line}; keep one"
                )
            first_line.setdefault(key.value, line)
        self.flatten_mapping(node)  # puts the keys that `<<` merges before the mapping's own
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        if (count := _nodes_with_aliases(node, {})) > MOST_NODES:
            raise _fault(
                f"{count:,} values, most of them repeated by aliases; a recipe may have at most {MOST_NODES:,}", node
            )
        return self.construct_document(node)

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def undefined(self, node: yaml.Node) -> None:
        raise _fault(
            "tags are not allowed in recipes; use plain values, and put text that begins with ! in quotes", node
        )  # without the text, which may be a password

    yaml_constructors = {  # noqa: RUF012 (PyYAML looks it up on the class)
        "tag:yaml.org,2002:null": _scalar(lambda text: None),
        "tag:yaml.org,2002:bool": _scalar(lambda text: _BOOLEANS[text.lower()]),
        "tag:yaml.org,2002:int": _scalar(lambda text: int(text.replace("_", ""))),
        "tag:yaml.org,2002:float": _scalar(lambda text: _float(text.lower())),
        "tag:yaml.org,2002:str": _scalar(_text),
        "tag:yaml.org,2002:seq": sequence,
        "tag:yaml.org,2002:map": mapping,
        None: undefined,
    }


def _nodes_with_aliases(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Count the nodes of a tree, each as often as it is named. An alias inside the node that it names counts as one."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = 1
        children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[node] = 1 + sum(_nodes_with_aliases(child, known) for child in children)
    return known[node]


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what the loader would otherwise read as something other than text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


class YamlProblem(ValueError):
    """Text that is not YAML, or not the plain kind that a recipe is made of; has the line and column."""


def parse(text: str) -> tuple[Any, list[str]]:
    """Parse a YAML text; return its value, and a line for each key that is given twice.

    Raises:
        YamlProblem: if the text cannot be read at all.
    """
    if len(text) > LARGEST_TEXT:
        raise YamlProblem(f"has {len(text):,} characters, but a recipe may have at most {LARGEST_TEXT:,}")
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {len(before) - (before.rfind(chr(10)) + 1) + 1}"
        raise YamlProblem(f"{place}: the character {text[error.position]!r} is not allowed; remove it") from error
    try:
        return loader.get_single_data(), loader.problems
    except yaml.MarkedYAMLError as error:
        mark, told = error.problem_mark or error.context_mark, _in_plain_words(error)
        at_its_place = f"line {mark.line + 1}, column {mark.column + 1}: {told}" if mark else told
        raise YamlProblem(at_its_place) from error
    except RecursionError as error:
        raise YamlProblem("is nested too deeply for a recipe") from error
    finally:
        loader.dispose()


def _in_plain_words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or str(error)
    if isinstance(error, _Fault):
        return problem
    if r"'\t'" in problem:
        return "this line is indented with a tab; use spaces"
    if "alias" in problem:
        return "invalid syntax (undefined alias); put text that begins with * in quotes"  # which may be a password
    hints = {
        "mapping values are not allowed": "put text that contains a colon in quotes, and check the indentation",
        "could not find expected ':'": "write `key: value`",
        "expected ',' or": "close the bracket",
        "expected <block end>": "check the indentation: the keys of a section must start in the same column",
        "found unexpected end of stream": "close the quote",
        "unconstructable recursive node": "an alias cannot be inside the value that it names",
        "but found another document": "keep only one document, without `---`",
    }
    hint = next((hint for phrase, hint in hints.items() if phrase in problem), None)
    return f"invalid syntax ({problem}); {hint}" if hint else f"invalid syntax ({problem})"


def leaves(tree: Any, above: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their keys, joined by dots. With `in_lists` the entries of lists are
    values too, by their numbers; else a list is one value, as an empty mapping is."""
    inner = dict(enumerate(tree)) if in_lists and isinstance(tree, list) else tree
    if not isinstance(inner, Mapping) or not inner:
        yield above, tree
        return
    for key, value in inner.items():
        yield from leaves(value, f"{above}.{key}" if above else str(key), in_lists=in_lists)


def render(value: Any) -> str:
    """Return YAML text that `parse` reads back as the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

"""The source of a function that was defined in a session or a notebook, as a file that works on its own."""

import ast
import dis
import inspect
import linecache
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PLAIN = (bool, int, float, str, bytes, type(None))


def named_function(function: Callable[..., Any]) -> str | None:
    """Return `package.module:function` or `file.py:function` for a function of an imported module, or None for a
    function of the session itself or one that the module does not contain under its name."""
    name, module = getattr(function, "__name__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return None
    if module.__spec__ is not None and "." in module.__name__:
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    return f"{Path(file).absolute()}:{name}" if file is not None and file.endswith(".py") else None


def written_function(function: Callable[..., Any]) -> tuple[str | None, str]:
    """Return the text of a file that defines a function, with the imports, constants, functions and classes of its
    module that it uses, or else None and the reason."""
    parts: dict[str, str] = {}
    try:
        _collect(function, parts)
    except _CannotStandAlone as error:
        return None, str(error)
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    others = [text for text in parts.values() if not text.startswith(("import ", "from "))]
    return "\n".join(imports) + "\n\n" * bool(imports) + "\n\n".join(others), ""


class _CannotStandAlone(ValueError):
    """The reason why a function cannot be written to a file."""


def _collect(function: Any, parts: dict[str, str]) -> None:
    """Add the source of a function or class to `parts` by name, after the source of what it uses."""
    name = getattr(function, "__name__", None)
    if name is None:
        raise _CannotStandAlone(f"it is a {type(function).__name__}, which has no source of its own")
    if inspect.ismethod(function):
        raise _CannotStandAlone(f"it is a method of a {type(function.__self__).__name__}")
    if name == "<lambda>":
        raise _CannotStandAlone("it is a lambda, which has no name")
    if getattr(function, "__closure__", None):
        raise _CannotStandAlone(
            f"it uses variables of the function around it ({', '.join(function.__code__.co_freevars)})"
        )
    source = _source_of(function)
    scope = _scope_of(function)
    parts.setdefault(name, "")  # for a function that calls itself
    for used in _names_used(source):
        if used not in scope:
            continue  # a missing name raises an error when the function is called, as in the session
        if used not in parts:
            _collect_value(used, scope[used], parts)
        if isinstance(scope[used], ModuleType):
            parts |= {module: f"import {module}" for module in _modules_below(scope[used], used, source)}
    del parts[name]
    parts[name] = source + "".join(f"{name}.{key} = {value!r}\n" for key, value in _attributes(function))


def _attributes(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the user has given a function, such as `batched`."""
    for key, value in vars(function).items() if inspect.isfunction(function) else ():
        if key == "__wrapped__":  # by functools.wraps, which the source calls
            continue
        if not _is_plain(value):
            raise _CannotStandAlone(f"its attribute {key} is a {type(value).__name__}, which cannot be written down")
        yield key, value


def _modules_below(module: ModuleType, name: str, source: str) -> Iterator[str]:
    """Yield the modules below a package that a source names, such as urllib.request: a module that other modules of
    the session have imported may be missing elsewhere."""
    for node in ast.walk(ast.parse(source)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        below = module.__name__ + dotted.removeprefix(name)
        if dotted.startswith(f"{name}.") and below in sys.modules:
            yield below


def _collect_value(name: str, value: Any, parts: dict[str, str]) -> None:
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    elif _is_plain(value):
        parts[name] = f"{name} = {value!r}\n"
    elif inspect.isfunction(value) or inspect.isclass(value):
        if value.__module__ == "__main__":
            _collect(value, parts)
            if value.__name__ != name:
                parts[name] = f"{name} = {value.__name__}\n"
        else:
            alias = "" if value.__name__ == name else f" as {name}"
            parts[name] = f"from {value.__module__} import {value.__name__}{alias}"
    elif inspect.isbuiltin(value) and value.__module__:
        parts[name] = f"from {value.__module__} import {value.__name__} as {name}"
    elif type(value).__module__ == "re":
        parts["re"] = "import re"
        parts[name] = f"{name}=re.compile({value.pattern!r}, {value.flags})\n"
    elif (of_typing := next((key for key, each in vars(typing).items() if each is value), None)) is not None:
        parts[name] = f"from typing import {of_typing} as {name}"
    else:
        raise _CannotStandAlone(
            f"it uses {name}, a {type(value).__name__} of this session, which cannot be written down"
        )


def _is_plain(value: Any) -> bool:
    """Return whether `repr` writes a value as Python reads it: not inf and NaN, nor a type derived from a plain one."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is dict:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return kind in PLAIN or (kind in (list, tuple, set, frozenset) and all(map(_is_plain, value)))


def _source_of(found: Any) -> str:
    """Return the source of a function or class. A notebook's class is found through its methods, because Python looks
    for it in the file of the module, which a notebook does not have."""
    try:
        if not inspect.isclass(found):
            return textwrap.dedent(inspect.getsource(found))
        method = next(each for each in vars(found).values() if inspect.isfunction(each)).__code__
        lines = linecache.getlines(method.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == found.__name__:
                start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if start <= method.co_firstlineno <= (node.end_lineno or 0):
                    return textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
    except (OSError, TypeError, SyntaxError, StopIteration) as error:
        raise _CannotStandAlone("its source cannot be found") from error
    raise _CannotStandAlone("its source cannot be found")


def _scope_of(function: Any) -> Mapping[str, Any]:
    """Return the names of the module that defines a function or class."""
    if hasattr(function, "__globals__"):
        return function.__globals__
    methods = [each for each in vars(function).values() if inspect.isfunction(each)]
    return methods[0].__globals__ if methods else {}


def _names_used(source: str) -> tuple[str, ...]:
    """Return the names of the module that a piece of source reads, including those of decorators and annotations."""
    return tuple(dict.fromkeys(_names_read(compile(source, "<source>", "exec"))))


def _names_read(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_read(inner)

"""The source of a function that was defined in a session or a notebook, as a file that works on its own."""

import ast
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tiercel.reliability.redaction import redact

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
            _collect_value(used, scope[used], parts, scope)
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
        _require_no_secret(key, value)
        yield key, value


def _require_no_secret(name: str, value: Any) -> None:
    if redact(repr(value)) != repr(value):
        raise _CannotStandAlone(f"it uses {name}, which holds a secret; read it from the environment inside")


def _modules_below(module: ModuleType, name: str, source: str) -> Iterator[str]:
    """Yield the modules below a package that a source names, such as urllib.request: a module that other modules of
    the session have imported may be missing elsewhere."""
    for node in ast.walk(ast.parse(source)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        below = module.__name__ + dotted.removeprefix(name)
        is_below = dotted.startswith(f"{name}.") and getattr(sys.modules.get(below), "__name__", None) == below
        if is_below:  # os.path is another module, which os brings
            yield below


def _collect_value(name: str, value: Any, parts: dict[str, str], scope: Mapping[str, Any]) -> None:
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    elif _is_plain(value):
        _require_no_secret(name, value)
        parts[name] = f"{name} = {value!r}\n"
    elif inspect.isfunction(value) or inspect.isclass(value):
        if value.__module__ == "__main__":
            own_name = value.__name__
            if own_name not in parts:
                _collect(value, parts)
            if own_name != name:
                if scope.get(own_name) is not value:
                    raise _CannotStandAlone(f"it uses {name}, and {own_name} is something else now")
                parts[name] = f"{name} = {own_name}\n"
        else:
            alias = "" if value.__name__ == name else f" as {name}"
            parts[name] = f"from {value.__module__} import {value.__name__}{alias}"
    elif inspect.isbuiltin(value) and value.__module__:
        parts[name] = f"from {value.__module__} import {value.__name__} as {name}"
    elif isinstance(value, re.RegexFlag):
        parts["re"] = "import re"
        parts[name] = f"{name} = re.RegexFlag({int(value)})\n"
    elif isinstance(value, re.Pattern):
        _require_no_secret(name, value.pattern)
        parts["re"] = "import re"
        parts[name] = f"{name}=re.compile({value.pattern!r}, {value.flags})\n"
    elif (there := _name_there(value, name)) is not None:  # such as typing's List and Literal
        alias = "" if there == name else f" as {name}"
        parts[name] = f"from {value.__module__} import {there}{alias}"
    else:
        raise _CannotStandAlone(
            f"it uses {name}, a {type(value).__name__} of this session, which cannot be written down"
        )


def _name_there(value: Any, name: str) -> str | None:
    """Return the name by which the module of a value has it, `name` if it is one; None if it has none."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return None
    names = [key for key, each in vars(module).items() if each is value]
    return name if name in names else next(iter(names), None)


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


def _names_used(source: str) -> Iterator[str]:
    """Yield each name of the module that a piece of source reads, in order, including decorators and annotations. A
    parameter or a local variable is none, even if the module has the same name."""
    of_module, waiting = set[str](), [symtable.symtable(source, "", "exec")]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        symbols = [each for each in scope.get_symbols() if each.is_referenced()]
        is_open = scope.get_type() in ("module", "class")  # a class may read a name of the module under its own name
        of_module |= {each.get_name() for each in symbols if is_open or each.is_global()}
    seen: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in of_module - seen:
            seen.add(node.id)
            yield node.id

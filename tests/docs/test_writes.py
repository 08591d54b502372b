"""docs/writes.md lists every place of the code that deletes, truncates or overwrites, with what it checks first."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writes.md"
ROW = re.compile(r"\| `([\w/]+\.py)`: `([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")

DELETES = {"unlink", "rmtree", "rmdir", "removedirs"}
WRITES = {
    *(
        "open_new",
        "open_to_append",
        "write_new",
        "write_atomically",
        "replacing",
        "write_text",
        "write_bytes",
        "truncate",
        "ftruncate",
    ),
    *("rename", "renames", "symlink_to", "symlink", "link", "hardlink_to", "copyfile", "copytree", "copy2", "move"),
    *("save_file", "save_pretrained", "export_chrome_trace", "touch"),
    *("mkdtemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile", "mkstemp"),
}
NO_FILE = {("models/weights/adapters.py", "read_adapter")}  # it renames keys of a config


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner_of(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def is_for_writing(call: ast.Call) -> bool:
    """Return whether a call of `open` may change a file. A call of `os.open` may, unless it only reads."""
    if owner_of(call) == "os":
        return "O_RDONLY" not in ast.unparse(call)
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(re.fullmatch(r"[rwaxbt+]+", mode) and set(mode) & set("wax+") for mode in modes)


def changes_files(call: ast.Call) -> bool:
    name, owner = name_of(call), owner_of(call)
    if name in DELETES | WRITES:
        return not (name in ("rename", "copy2", "move") and not owner)
    if name == "remove":
        return owner in ("", "os")
    if name == "replace":  # of a path, or of the system; a text's takes two texts, a dataclass's is a function
        return owner == "os" or (bool(owner) and len(call.args) == 1 and not call.keywords)
    if name == "save":  # of a picture, into a file that is named
        return any(isinstance(part, ast.Div) for each in call.args for part in ast.walk(each))
    return name == "open" and is_for_writing(call)


def places(code: str) -> dict[str, set[str]]:
    """The calls that change files, by the function or class that they stand in."""
    found: dict[str, set[str]] = defaultdict(set)

    def visit(node: ast.AST, inside: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
        if isinstance(node, ast.Call) and changes_files(node):
            found[".".join(inside)].add(name_of(node))
        if isinstance(node, ast.Attribute) and node.attr in DELETES and ast.unparse(node.value) in ("os", "shutil"):
            found[".".join(inside)].add(node.attr)  # also one that is passed on
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(code), ())
    return found


def in_code() -> Iterator[tuple[str, str, frozenset[str]]]:
    package = ROOT / "tiercel"
    for file in sorted(package.rglob("*.py")):
        for function, calls in places(file.read_text(encoding="utf-8")).items():
            if (place := (file.relative_to(package).as_posix(), function)) not in NO_FILE:
                yield *place, frozenset(calls)


def on_page() -> Iterator[tuple[str, str, frozenset[str]]]:
    for file, function, calls, *_ in ROW.findall(PAGE.read_text(encoding="utf-8")):
        yield file, function, frozenset(re.findall(r"\w+", calls))


def test_the_page_has_every_place_and_no_other():
    code, page = set(in_code()), list(on_page())
    assert sorted(code - set(page)) == [], "write them into docs/writes.md, with what is checked first"
    assert sorted(set(page) - code) == [], "take them out of docs/writes.md"
    assert len(page) == len(set(page))
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(page), "a row has a place, its calls, what it writes, and what it checks first"
    assert all(cell.strip() for line in rows for cell in line.strip("|").split("|"))


FOUND = """
import os, shutil
def one(path):
    path.unlink()
    os.remove(path)
class Two:
    def three(self, path):
        shutil.rmtree(path)
        path.replace(path)
        path.open("w")
        open(path, mode="ab")
        os.open(path, os.O_RDWR)
        image.save(path / "a.png")
        undo.callback(shutil.rmtree, path)
"""
NOT_FOUND = """
def one(path, text, names, recipe):
    path.open("rb"), open(path), os.open(path, os.O_RDONLY | os.O_NOFOLLOW), dialogues.open(prompt, [0])
    text.replace("a", "b"), names.remove(1), replace(recipe, output="w"), image.save(buffer, format="PNG")
"""


def test_what_counts_as_a_place():
    assert places(FOUND) == {
        "one": {"unlink", "remove"},
        "Two.three": {"rmtree", "replace", "open", "save"},
    }
    assert places(NOT_FOUND) == {}


@pytest.mark.parametrize("line", ("Path(a).write_text(b)", "a.rename(b)", "save_file(t, p)", "a.symlink_to(b)"))
def test_a_new_place_is_missed_on_the_page(line):
    assert places(f"def new():\n    {line}\n").keys() == {"new"}

"""Imports run one way, and modules that must start at once load nothing heavy."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tiercel"

# A module imports from the layers before its own and from its own package, never from one next to it or above it.
LAYERS = (
    {
        "message_text",
        "secret_names",
        "messages",
        "old_import_paths",
        "regular_files",
        "image_decoding",
        "devices",
        "processes",
        "log",
    },
    {"__init__", "errors", "reward_types", "tables"},
    {"geometry", "config_base", "user_functions"},
    {"rewards", "algorithms"},
    {"types", "config", "writing"},
    {"reliability"},
    {"http_json"},
    {"models"},
    {"data"},
    {"distributed"},
    {"packing", "runs", "sandbox"},
    {"rollout"},
    {"rewards.runtime"},
    {"environments"},
    {"web.report", "planning", "doctor", "convert"},
    {"trackers", "web.view"},
    {"training"},
    {"inference_and_export"},
    {"api"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def home_of(file: Path) -> str:
    """The package below tiercel, or the module there, that a file belongs to."""
    return home_of_module(".".join(file.relative_to(PACKAGE).with_suffix("").parts))


def home_of_module(name: str) -> str:
    """The layer's name for a module, without `tiercel.`: `web.view` for `web.view.server`, `config` for
    `config.data`."""
    first, _, rest = name.partition(".")
    longer = f"{first}.{rest.partition('.')[0]}"
    return longer if longer in LAYER_OF else first


@dataclass(frozen=True)
class Source:
    """What the tests ask of a file: its imports, inside functions and for type checkers too, classes and patterns."""

    modules: list[str]  # import MODULE
    members: list[tuple[str, str]]  # from MODULE import MEMBER
    classes: list[str]
    patterns: list[str]  # texts in calls of re


@cache
def source(file: Path) -> Source:
    found = Source([], [], [], [])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{file}: imports are written in full"
            found.members.extend((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            found.patterns.extend(text.decode() if isinstance(text, bytes) else str(text) for text in texts)
    return found


def imported(file: Path) -> set[str]:
    """Homes of the tiercel modules that a file imports, inside functions too."""
    names = [*source(file).modules, *(f"{module}.{member}" for module, member in source(file).members)]
    homes = {home_of_module(name.removeprefix("tiercel.")) for name in names if name.startswith("tiercel.")}
    return {home if home in LAYER_OF else "__init__" for home in homes}


def test_every_module_has_a_layer():
    homes = {home_of(file) for file in module_files() if file != PACKAGE / "web/__init__.py"}
    assert homes == set(LAYER_OF)


@pytest.mark.parametrize("home", sorted(LAYER_OF))
def test_no_module_imports_from_beside_or_above(home):
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in module_files()
        if home_of(file) == home
        for name in sorted(imported(file) - {home})
        if LAYER_OF[name] >= LAYER_OF[home]
    ]
    assert wrong == []


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of_modules() -> dict[str, set[str]]:
    """For each module of the package those that it imports, inside functions and for type checkers too."""
    files = {module_name(file): file for file in module_files()}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        members = source(file).members
        taken = {f"{module}.{member}" if f"{module}.{member}" in files else module for module, member in members}
        found[name] = {*source(file).modules, *taken} & files.keys()
    return found


def test_no_modules_import_each_other_in_a_circle():
    imports = imports_of_modules()
    while free := {name for name, others in imports.items() if not others & imports.keys()}:
        imports = {name: others for name, others in imports.items() if name not in free}
    assert imports == {}  # modules of a cycle, and those that import one


def test_a_class_name_has_one_meaning():
    homes: dict[str, list[str]] = {}
    for file in module_files():
        for name in source(file).classes:
            homes.setdefault(name, []).append(module_name(file))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


NEWER_PATTERN = re.compile(r"[+*?}]\+|\(\?>")  # a possessive quantifier, an atomic group
ESCAPES_AND_SETS = re.compile(r"\\.|\[\^?\]?[^]]*\]")


def test_patterns_are_those_of_python_3_10():
    patterns = [text for file in module_files() for text in source(file).patterns]
    assert [text for text in patterns if NEWER_PATTERN.search(ESCAPES_AND_SETS.sub("x", text))] == []


def test_the_report_knows_run_directories_and_the_parser_only():
    allowed = {
        "__init__",
        "errors",
        "reward_types",
        "message_text",
        "config",
        "tables",
        "geometry",
        "writing",
        "regular_files",
        "reliability",
        "rewards",
        "runs",
        "web.report",
    }
    files = [file for file in module_files() if home_of(file) == "web.report"]
    assert {name for file in files for name in imported(file)} <= allowed


def loaded_by(program: str) -> set[str]:
    """Top-level modules that are loaded once the program has run."""
    lines = f"{program}\nimport sys\nprint('LOADED', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("LOADED"))
    return set(line.split()[1:])


MODELS = {"transformers", "peft", "vllm", "deepspeed"}
HEAVY = MODELS | {"torch", "numpy", "PIL"}
HELP = """
import contextlib, io
from tiercel.cli.main import main
for command in ([], ["grpo"], ["check"], ["doctor"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([*command, "--help"])
"""


def test_types_recipes_and_algorithms_need_no_model_library():
    loaded = loaded_by("import tiercel.types, tiercel.config, tiercel.algorithms")
    assert "torch" in loaded  # because of tiercel.types
    assert not loaded & MODELS


@pytest.mark.parametrize(
    "program",
    [
        "import tiercel.config, tiercel.algorithms, tiercel.errors, tiercel.reward_types, tiercel.geometry",
        HELP,
        "from tiercel.cli.main import build_parser; build_parser()",
        "import tiercel.rewards.runtime.worker, tiercel.environments.worker, tiercel.rewards.registry",
        "import tiercel.cli.doctor",
    ],
    ids=("config", "help", "parser", "rewards", "doctor"),
)
def test_what_must_start_at_once_loads_nothing_heavy(program):
    assert not loaded_by(program) & HEAVY


def test_a_report_is_written_without_torch():
    loaded = loaded_by("import tiercel.web.report")
    assert not loaded & (HEAVY - {"PIL"})  # pictures are reduced for the page


def test_a_wrong_recipe_in_python_is_refused_without_torch(tmp_path):
    run = tmp_path / "run"
    program = (
        "import contextlib\nimport tiercel as tc\nfrom tiercel.errors import RecipeError\n"
        "rows = [{'messages': [{'role': 'user', 'content': '?'}], 'answer': '1'}]\n"
        "with contextlib.suppress(RecipeError):\n"
        f"    tc.grpo(model='m', data=rows, rewards='exact', learning_rate=1, steps=1, output={str(run)!r})\n"
        "    raise AssertionError"
    )
    assert not loaded_by(program) & (HEAVY - {"PIL"}) and not run.exists()


def test_a_wrong_recipe_is_refused_without_torch(tmp_path):
    (tmp_path / "wrong.yaml").write_text("model: {path: m}\nlearning_rate: 1\n", encoding="utf-8")
    program = (
        "import contextlib, io\nfrom tiercel.cli.main import main\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n"
        f"    assert [main([kind, {str(tmp_path / 'wrong.yaml')!r}]) for kind in ('sft', 'grpo')] == [2, 2]"
    )
    assert not loaded_by(program) & HEAVY

"""A wrong recipe is reported at once, by every command that reads one, before anything heavy is imported."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.commands import leaves, positionals, required_options
from tests.forked import Nursery
from tests.test_imports import HEAVY
from tiercel.cli.arguments import build_parser
from tiercel.cli.main import COMMANDS, main

WRONG = "model: {path: m}\nlearning_rate: 1\n"
IMPORTED = re.compile(r"import time:[^|]*\|[^|]*\|\s*(\w+)")
# What the commands' positional arguments may be. A new one must be added here, so that its command is tried as well.
RECIPE_FILES = {"recipe", "target"}
RUNS = {"run", "target", "model", "folders"}
NEITHER = {
    "overrides": [],
    "prompt": ["Where?"],
    "given": ["swift sft"],
    "runs": [],
}  # `runs` are served: tests/web/view
SHOWN_AS_IT_IS = ("report", "rollouts", "runs")  # a run is shown whatever has become of its recipe


def cases() -> list[tuple[str, ...]]:
    """Yield the words of a command on a wrong recipe file and on a run with a wrong recipe. FILE and RUN are
    placeholders for both."""
    found = []
    for words, parser in leaves(build_parser()):
        names = positionals(parser)
        assert set(names) <= RECIPE_FILES | RUNS | NEITHER.keys()
        for stand_in, reads in (("FILE", RECIPE_FILES), ("RUN", RUNS)):
            if any(name in reads for name in names):
                given = [word for name in names for word in ([stand_in] if name in reads else NEITHER[name])]
                found.append((*words, *given, *required_options(parser)))
    return found


def test_every_command_with_a_recipe_is_tried():
    assert {words[0] for words, _ in leaves(build_parser())} == set(COMMANDS)
    reading = {name for name, command in COMMANDS.items() if command.read is not None}
    assert {case[0] for case in cases()} == reading | set(SHOWN_AS_IT_IS)


def test_every_command_has_a_module_that_runs_it():
    for command in COMMANDS.values():
        spec = find_spec(command.module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
        expected = ["recipe", "arguments", "heartbeat"] if command.is_watched else ["recipe", "arguments"]
        assert [argument.arg for argument in run.args.args] == expected


@pytest.fixture(scope="module")
def started() -> Iterator[Nursery]:
    """What commands are forked from: it has imported what reads a recipe."""
    made = Nursery(["tiercel.cli.main", "tiercel.config"], {})
    yield made
    made.close()


@pytest.mark.parametrize("case", cases(), ids=" ".join)
def test_a_wrong_recipe_is_answered_before_torch_is_imported(case, tmp_path, started):
    words = on_a_wrong_recipe(case, tmp_path)
    with (tmp_path / "said").open("wb") as out, (tmp_path / "errors").open("wb") as err:
        command = started.start(words, out, err, module="tests.cli.told_imports")
    code, said = command.wait(60), (tmp_path / "errors").read_text()
    imported = set(said.rpartition("imported:")[2].split())
    assert "tiercel" in imported and not imported & (HEAVY - {"PIL"})
    if case[0] not in SHOWN_AS_IT_IS:
        assert_refused(code, said)


def test_a_command_of_its_own_interpreter_answers_before_torch_is_imported(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "tiercel", *on_a_wrong_recipe(("check", "FILE"), tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = set(IMPORTED.findall(done.stderr))
    assert "tiercel" in imported and not imported & (HEAVY - {"PIL"})
    assert_refused(done.returncode, done.stderr)


def on_a_wrong_recipe(case: tuple[str, ...], folder: Path) -> list[str]:
    """Write a wrong recipe and a run that has it, and return the words of a command on them."""
    (folder / "wrong.yaml").write_text(WRONG)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(f"# tiercel grpo\n{WRONG}")
    places = {"FILE": str(folder / "wrong.yaml"), "RUN": str(folder / "run")}
    return [places.get(word, word) for word in case]


def assert_refused(code: int, said: str) -> None:
    assert code == 2, said
    assert "learning_rate: unknown key (its value is 1); use optim.lr" in said


def test_a_wrong_recipe_of_a_run_is_refused_before_ranks_are_started(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(f"# tiercel grpo\n{WRONG}")
    assert main(["eval", str(tmp_path), "--nproc", "2"]) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_a_recipe_that_no_server_can_sample_for_is_refused(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path}/m}}\ndata: {{train: {tmp_path}/rows.jsonl}}\ntrain: {{steps: 1}}\noutput: run\n"
    )
    assert main(["serve", str(recipe)]) == 2
    assert "is not a GRPO recipe" in capsys.readouterr().err
    assert main(["eval", str(recipe)]) == 2
    assert "data.eval is not set" in capsys.readouterr().err

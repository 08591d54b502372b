"""Where the demos' recipes come from."""

from pathlib import Path

import pytest

from tiercel.cli.main import main
from tiercel.demo import command
from tiercel.demo.running import SHIPPED, require_recipes
from tiercel.errors import RunError

ROOT = Path(__file__).parents[2]


def test_the_package_ships_the_recipes_of_the_repository():
    for recipe in (ROOT / "recipes").glob("demo-*.yaml"):
        assert (SHIPPED / recipe.name).read_bytes() == recipe.read_bytes()


def test_a_recipe_that_is_not_there_is_copied_and_one_that_is_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    require_recipes("demo-sft.yaml")
    copied = tmp_path / "recipes/demo-sft.yaml"
    assert copied.read_bytes() == (SHIPPED / "demo-sft.yaml").read_bytes()
    require_recipes("demo-sft.yaml")
    assert capsys.readouterr().out == ""
    copied.write_text("train: {steps: 3}\n")
    require_recipes("demo-sft.yaml")
    assert copied.read_text() == "train: {steps: 3}\n"
    assert "recipes/demo-sft.yaml is not the one that this tiercel ships" in capsys.readouterr().out


def test_a_directory_that_cannot_have_recipes_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").write_text("a file")
    with pytest.raises(RunError, match=r"recipes/demo-sft\.yaml cannot be written: .*a directory that can be written"):
        require_recipes("demo-sft.yaml")


@pytest.mark.parametrize("name", ("pairs", "zoom"))
def test_a_demo_of_the_repository_runs_there_and_elsewhere_says_where_it_is(name, tmp_path, monkeypatch, capsys):
    run = []
    monkeypatch.setattr(f"examples.{name}.demo.run", lambda: run.append(name))
    assert main(["demo", f"--{name}"]) == 0 and run == [name]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert main(["demo", f"--{name}"]) == 2
    assert f"make demo-{name}" in capsys.readouterr().err

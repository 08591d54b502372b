"""Files that a recipe names and that have changed when a run resumes."""

import json
from pathlib import Path

import pytest

from tests.runs.test_directory import grpo_recipe, make, make_a_step
from tiercel.config.schema import Data, Lora, Model
from tiercel.runs import identity
from tiercel.runs.directory import open_run
from tiercel.runs.identity import digests


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "model/nested", "adapter"):
        Path(name).mkdir()
    files = ("rows.jsonl", "t.jinja", "own.py", "model/config.json", "model/model.safetensors", "model/README.md")
    for name in (*files, "adapter/adapter_config.json", "tool.py"):
        Path(name).write_text(name)
    Path("rw.py").write_text("import beside")
    Path("beside.py").write_text("")
    return grpo_recipe(
        Path("run"),
        model=Model(path="model"),
        data=Data(train="rows.jsonl", template="t.jinja"),
        lora=Lora(init="adapter"),
        rewards=[{"call": "rw.py:score"}, {"call": "own:other"}, {"call": "package.module:other"}],
        rollout={"tools": ("tool.py:look",), "max_turns": 2},
    )


def told(recipe) -> tuple[str, ...]:
    with open_run(recipe) as run:
        return run.changed


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rows.jsonl", "data.train"),
        ("t.jinja", "data.template"),
        ("rw.py", "rewards.0.call"),
        ("beside.py", "rewards.0.call"),
        ("own.py", "rewards.1.call"),
        ("tool.py", "rollout.tools"),
        ("model/model.safetensors", "model.path"),
        ("adapter/adapter_config.json", "lora.init"),
    ],
)
def test_another_content_is_told_once(recipe, name, key):
    make_a_step(recipe)
    Path(name).write_text(name.swapcase())
    (line,) = told(recipe)
    assert line.startswith(f"{key}: ")
    assert told(recipe) == ()


def test_another_version_of_a_package_is_told_once(recipe):
    make_a_step(recipe)
    file = Path("run/env.json")
    described = json.loads(file.read_text())
    assert "torch" in described["packages"]
    described["packages"] |= {"torch": "2.0.0", "gone": "1"}
    file.write_text(json.dumps(described))
    assert [line.split(" ")[0] for line in told(recipe)] == ["torch:", "gone:"]
    assert told(recipe) == ()


def test_what_no_run_reads_and_a_run_without_a_step_do_not_matter(recipe):
    make(recipe)
    Path("rows.jsonl").write_text("others")
    assert told(recipe) == ()
    make_a_step(recipe)
    Path("model/README.md").write_text("others")
    Path("rw.py").touch()
    assert told(recipe) == ()


def test_files_of_several_environments_are_digested(recipe):
    Path("map.py").write_text("")
    rollout = recipe.rollout.model_copy(update={"environment": {"a": "tool.py:A", "b": "map.py:B"}})
    several = recipe.model_copy(update={"rollout": rollout})
    before = digests(several)["rollout.environment"]
    Path("map.py").write_text("1")
    assert digests(several)["rollout.environment"] != before


def test_a_run_of_an_older_version_has_no_digests(recipe):
    make_a_step(recipe)
    file = Path("run/env.json")
    described = json.loads(file.read_text())
    assert described.pop("files") == digests(recipe) and len(digests(recipe)) == 7
    file.write_text(json.dumps(described))
    Path("rows.jsonl").write_text("others")
    assert told(recipe) == ()


@pytest.mark.parametrize("place", (0, 5000, 9999))
def test_of_a_large_file_parts_are_read(recipe, monkeypatch, place):
    monkeypatch.setattr(identity, "_WHOLE", 1000)
    monkeypatch.setattr(identity, "_PIECE", 200)
    data = bytearray(10_000)
    Path("model/model.safetensors").write_bytes(data)
    before = digests(recipe)
    data[place] = 1
    Path("model/model.safetensors").write_bytes(data)
    assert {key for key, digest in digests(recipe).items() if before[key] != digest} == {"model.path"}

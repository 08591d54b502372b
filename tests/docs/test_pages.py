"""Pages of docs/ name commands, recipes, rows and keys that exist, and can be reached."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks, commands, pages
from tiercel.cli.arguments import build_parser
from tiercel.config import load_recipe
from tiercel.config.keys import every_key
from tiercel.config.yaml_text import parse
from tiercel.data.formats.registry import detect_format, rows_of
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.types import ImageRoots, Row

ROOT = DOCS.parent
WRITTEN = [DOCS / "start.md", *pages("how-to", "failures")]
HOW_TO = [page for page in pages("how-to") if page.name != "index.md"]
VERBS = {"dpo": "dpo", "kto": "kto", "teacher": "distill", "rewards": "grpo"}
KEY = re.compile(r"`((?:\w+)(?:\.\w+)+)(?::[^`]*)?`")
NO_KEYS = {"rewards.N.pattern", "model.safetensors.index.json"}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_commands_are_understood(page):
    for words in commands(page):
        if words[0] == "tiercel":
            build_parser().parse_args(words[1:]) if words[1:] != ["--version"] else None
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words:
            assert not word.startswith("recipes/") or (ROOT / word).is_file()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_keys_are_those_of_a_recipe(page):
    keys = {key.path for key in every_key()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = {name for name in KEY.findall(page.read_text(encoding="utf-8")) if name.partition(".")[0] in sections}
    assert named - keys - NO_KEYS == set()


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_recipes_of_a_situation_are_valid(page, tmp_path):
    texts = blocks(page, "yaml")
    assert texts
    for text in texts:
        tree, _ = parse(text)
        kind = next(verb for section, verb in VERBS.items() if section in tree)
        (tmp_path / "recipe.yaml").write_text(text)
        load_recipe(kind, tmp_path / "recipe.yaml", check_paths=False)


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_rows_of_a_situation_are_read(page):
    texts = blocks(page, "json")
    assert texts
    for text in texts:
        record = json.loads(text)
        purpose = next((verb for key, verb in (("rejected", "pairs"), ("label", "labels")) if key in record), "grpo")
        reading = Reading(
            file="rows.jsonl",
            purpose=purpose,
            image_roots=ImageRoots(),
            image_size=lambda source: (640, 480),
            prompt=None,
        )
        (row,) = rows_of(Record(line=1, value=record), detect_format([record], "rows.jsonl"), reading)
        assert isinstance(row, Row)


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_situation_has_all_its_parts(page):
    headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["A row", "The recipe", "The commands", "What to see", "What goes wrong"]


@pytest.mark.parametrize(
    "page", [page for page in pages("failures") if page.name != "index.md"], ids=lambda page: page.stem
)
def test_a_failure_begins_with_the_text_that_is_searched_for(page):
    text = page.read_text(encoding="utf-8")
    assert blocks(page, "text")
    assert text.index("```text") < text.index("## Why it happens") < text.index("## What tiercel does")
    assert "## What to do" in text or page.stem == "marked-ready-only-once"


def test_every_failure_is_in_the_list():
    text = (DOCS / "failures" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", text)) == {page.name for page in pages("failures")} - {"index.md"}


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(name for name in found if not name.startswith("zh/"))  # "zh/" lists its own


def test_the_example_of_the_recipe_page_runs(tmp_path, monkeypatch, capsys):
    (program,) = blocks(DOCS / "api" / "recipe.md", "python")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("")
    Path("recipe.yaml").write_text(
        "model: {path: org/name}\ndata: {train: rows.jsonl}\nlora: {rank: 4, alpha: 8}\nrewards: [{name: iou}]\n"
        "train: {steps: 1}\noutput: run\n"
    )
    exec(compile(program, "recipe.md", "exec"), {})
    assert capsys.readouterr().out == "2e-05 iou\n"

"""docs/zh corresponds to docs/: its tables are made from the same code, and its pages have the same sections."""

import json
import re
from pathlib import Path

import pytest

from tiercel.config.schema import Data, GrpoRecipe, SftRecipe
from tiercel.config.yaml_text import parse
from tiercel.data.formats.registry import FORMATS, detect_format
from tools.docs.chinese import Speaker, descriptions, tables
from tools.docs.links import problems_of
from tools.docs.tables import with_table

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "docs", ROOT / "docs/zh"
PAGES = sorted(CHINESE.glob("*.md"))
# The sections of these correspond one to one. Of the others, the Chinese page is shorter.
SAME_SECTIONS = ("algorithms.md", "coming-from.md", "data.md", "recipe.md", "rewards.md", "troubleshooting.md")
# Subsections of the Chinese page that are entries for errors of other frameworks, or for pages in docs/failures.
FENCE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
LONGEST_README = 150  # lines


def sections(page: Path, level: int = 2) -> list[str]:
    """The headings of a level, without those in code."""
    return re.findall(rf"^{'#' * level} (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)


def test_the_tables_are_up_to_date():
    """Mended by: make docs."""
    for page, named in tables(Speaker()).items():
        text = (CHINESE / page).read_text(encoding="utf-8")
        for name, table in named.items():
            assert with_table(text, name, table) == text, f"docs/zh/{page}: run make docs"


def test_every_text_of_a_table_has_its_chinese_and_none_is_left_over():
    speaker = Speaker()
    tables(speaker)
    assert descriptions().keys() - speaker.used == set(), "no table says these any more"


def test_a_text_without_chinese_is_named():
    with pytest.raises(KeyError, match="has no Chinese of: A meaning that was changed"):
        Speaker().say("A meaning that was changed.")
    assert Speaker().say("`answer`") == "`answer`"


def test_the_keys_of_the_recipe_are_those_of_the_english_page():
    rows = [re.findall(r"^\| (`[^|]+`) \|", (folder / "recipe.md").read_text(), re.M) for folder in (ENGLISH, CHINESE)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_its_english_counterpart_and_leads_to_it(page):
    assert (ENGLISH / page.name).is_file()
    assert f"](../{page.name})" in page.read_text(encoding="utf-8").split("\n## ")[0]


@pytest.mark.parametrize("name", SAME_SECTIONS)
def test_a_page_has_the_sections_of_its_counterpart(name):
    english, chinese = sections(ENGLISH / name), sections(CHINESE / name)
    assert len(english) == len(chinese), f"docs/{name} has {english}, docs/zh/{name} has {chinese}"
    codes = [[re.findall(r"`[^`]+`", heading) for heading in headings] for headings in (english, chinese)]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.zh-CN.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert list(problems_of(page, ROOT)) == []


def test_both_readmes_lead_to_each_other():
    assert "](README.zh-CN.md)" in (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert "](README.md)" in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8").split("\n## ")[0]


def code_lines(page: Path) -> list[str]:
    """The lines of code, fenced or indented, without their comments, which are translated."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()]
    lines += re.findall(r"^    \S.*$", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"\s+# .*$", "", line) for line in lines]


def table_rows(page: Path) -> list[tuple[int, list[str]]]:
    """The number of cells of each row of a table, and the commands and functions in it."""
    rows = re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [(row.count("|"), re.findall(r"`[^`]+`", row)) for row in rows]


def targets(page: Path) -> set[str]:
    """The pages that a page links to, with the English one in place of a Chinese one."""
    found = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    return {target.replace("docs/zh/", "docs/") for target in found} - {readme.name for readme in READMES}


@pytest.mark.parametrize("of", (code_lines, table_rows, targets))
def test_both_readmes_have_the_same(of):
    english, chinese = map(of, READMES)
    assert english == chinese and len(english) > 5


def test_both_readmes_have_the_same_sections_and_are_short():
    texts = [FENCE.sub("", readme.read_text(encoding="utf-8")) for readme in READMES]
    levels = [[len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)] for text in texts]
    bullets = [len(re.findall(r"^- ", text, re.MULTILINE)) for text in texts]
    assert levels[0] == levels[1] and len(levels[0]) > 8 and bullets[0] == bullets[1]
    assert all(len(readme.read_text(encoding="utf-8").splitlines()) <= LONGEST_README for readme in READMES)


def test_the_figures_of_both_readmes_are_the_same():
    figures = [re.findall(r"\d[\d,.]*\d", readme.read_text(encoding="utf-8")) for readme in READMES]
    assert sorted(figures[0]) == sorted(figures[1])


def test_the_chinese_readme_leads_to_every_chinese_page():
    text = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"](docs/zh/{page.name})" not in text] == []


def test_every_page_of_a_failure_has_an_entry_in_chinese():
    text = (CHINESE / "troubleshooting.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ENGLISH / "failures").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"](../failures/{page})" not in text} == set()


def test_every_entry_of_the_english_troubleshooting_is_there():
    def codes(page: Path) -> set[str]:
        return {code for heading in sections(page, 3) for code in re.findall(r"`([^`]+)`", heading)}

    there = " ".join(sections(CHINESE / "troubleshooting.md", 3))
    words = {code: [word for word in re.findall(r"\w{4,}", code)][:3] for code in codes(ENGLISH / "troubleshooting.md")}
    assert [code for code, parts in words.items() if not all(part in there for part in parts)] == []


def test_the_examples_of_rows_are_read_as_the_formats_that_they_show():
    text = (CHINESE / "data.md").read_text(encoding="utf-8")
    found = []
    for section in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        name = next(iter(re.findall(r"^### `(\w+)`$", section, re.MULTILINE)), "tiercel")
        for block in re.findall(r"^```json\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            record = json.loads(block)
            assert detect_format([record], "rows.jsonl") == ("swift" if "label" in record else name)
            found.append(name)
    assert set(found) == set(FORMATS)


def test_the_examples_of_recipes_are_valid():
    data = re.findall(r"^```yaml\n(.*?)^```", (CHINESE / "data.md").read_text(encoding="utf-8"), re.M | re.S)
    assert all(Data.model_validate(parse(block)[0]["data"]) for block in data) and len(data) > 3
    sft, grpo = re.findall(r"^```yaml\n(.*?)^```", (CHINESE / "recipe.md").read_text(encoding="utf-8"), re.M | re.S)
    assert SftRecipe.model_validate(parse(sft)[0]) and GrpoRecipe.model_validate(parse(grpo)[0])
    start = re.findall(r"^```yaml\n(.*?)^```", (CHINESE / "start.md").read_text(encoding="utf-8"), re.M | re.S)
    readme = re.findall(r"^```yaml\n(.*?)^```", READMES[1].read_text(encoding="utf-8"), re.M | re.S)
    found = [*start, *readme]
    assert all(GrpoRecipe.model_validate(parse(block)[0]) for block in found) and len(found) == 2


def test_the_figures_of_what_was_tried_are_those_of_the_english_page():
    def rows(folder: Path) -> list[str]:
        text = (folder / "coming-from.md").read_text(encoding="utf-8")
        table = text.split("<!-- coverage -->\n")[1].split("<!-- end -->")[0]
        lines = [line for line in table.splitlines()[1:] if line.startswith("|")]
        return [line.split(" | ", 1)[1] for line in lines]  # what comes before the figures is translated

    assert rows(ENGLISH) == rows(CHINESE)

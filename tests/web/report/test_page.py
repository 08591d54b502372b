import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.web.report.fake_runs import (
    completion,
    cut_last_lines,
    group,
    make_empty,
    make_grounding,
    make_sft,
    make_text,
    make_turns,
    write_lines,
)
from tiercel.web.report import write_report
from tiercel.web.report.page_sections import TABS

VOID = {"meta", "br", "input"}
PLACES = {f"#{tab}" for tab in TABS}  # of the page itself


class Page(HTMLParser):
    """Checks that tags match, and keeps what a browser would make of the page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.stack: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.stack == []
    return page


@pytest.fixture(scope="module")
def grounding(tmp_path_factory):
    return make_grounding(tmp_path_factory.mktemp("runs") / "grounding", steps=10, rows=20)


@pytest.fixture(scope="module")
def page(grounding):
    return page_of(grounding)


def test_everything_is_on_the_page(page):
    for heading in ("Curves", "Before and after", "Rollouts", "Recipe", "Environment", "Rejected rows"):
        assert heading in page.text
    assert "GRPO, 10 steps: held-out accuracy" in page.text
    assert "ZeroDivisionError: division by <zero>" in page.text
    assert "masked" in page.text and "truncated" in page.text
    assert "right box" in page.text and "asked of a tool" not in page.text
    assert "characters left out here" in page.text
    assert "and 5 rows more in bad_rows.jsonl" in page.text
    assert "tiercel grpo config.yaml" in page.text


def test_nothing_hostile_gets_through(page):
    assert page.tags.count("script") == 1 and "img" not in page.tags and "b" in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "<script>document.title='owned'</script>" in page.text


def test_the_page_loads_nothing_from_elsewhere(grounding, page):
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    links = [link for link in links if link not in PLACES]
    assert links and all(link.startswith(("data:image/", "#image-")) for link in links)
    assert len(links) <= 60
    text = (grounding / "report.html").read_text(encoding="utf-8")
    assert any(value.startswith("default-src 'none'; img-src data:;") for _, value in page.attributes)
    assert "url(" not in text and "@import" not in text
    assert len(text) < 6_000_000


def test_equal_runs_give_equal_pages(grounding, page):
    first = (grounding / "report.html").read_bytes()
    assert write_report(grounding).read_bytes() == first


def test_an_unfinished_run_with_cut_lines(tmp_path):
    run = make_grounding(tmp_path / "run", steps=10, done=6, rows=10)
    cut_last_lines(run)
    page = page_of(run)
    assert "The run is not at its end: 5 of 10 steps are done." in page.text
    assert "Left out of metrics.jsonl: 1 line that cannot be read" in page.text
    assert "Left out of rollouts/step-000006.jsonl: 1 line that cannot be read." in page.text


def test_a_run_of_text_alone(tmp_path):
    page = page_of(make_text(tmp_path / "run"))
    assert "Right answer 42" in page.text and "Right answer Paris" in page.text
    assert "image" not in page.tags
    assert "1 fixed" in page.text


def test_sft_has_curves_and_no_rollouts(tmp_path):
    page = page_of(make_sft(tmp_path / "run"))
    assert "SFT, 200 steps" in page.text and "Learning rate" in page.text
    assert "Rollouts" not in page.text and "Before and after" not in page.text


def test_a_run_that_has_just_started(tmp_path):
    page = page_of(make_empty(tmp_path / "run"))
    assert "nothing recorded yet" in page.text and "No step is recorded yet." in page.text


def test_a_run_without_coordinate_space_says_so(tmp_path):
    run = make_grounding(tmp_path / "run", steps=2, rows=4)
    for file in [*(run / "rollouts").iterdir(), *(run / "evaluations").iterdir()]:
        file.write_text(file.read_text(encoding="utf-8").replace('"resized_pixels"', "null"), encoding="utf-8")
    page = page_of(run)
    assert "so predicted boxes are not drawn" in page.text
    assert not any(name == "class" and value.startswith("outline after") for name, value in page.attributes)


def test_missing_images_are_counted(tmp_path):
    run = make_grounding(tmp_path / "run", steps=2, rows=4)
    for file in (run / "images").iterdir():
        file.unlink()
    assert re.search(r"Of the rows shown, \d+ images cannot be read from images/\.", page_of(run).text)


def test_many_completions_show_the_ends(tmp_path):
    run = make_text(tmp_path / "run")
    file = run / "rollouts" / "step-000004.jsonl"
    made = [completion(f"number {number}", {"mine": float(number)}, None) for number in range(40)]
    write_lines(file, [group("many", "Which?", None, [], made)])
    page = page_of(run)
    assert "The best and the worst 8 of 40 completions." in page.text
    assert "number 39" in page.text and "number 0" in page.text and "number 20" not in page.text


@pytest.fixture(scope="module")
def turns_run(tmp_path_factory):
    return make_turns(tmp_path_factory.mktemp("runs") / "turns")


def test_trajectories_are_on_the_page(turns_run):
    page = page_of(turns_run)
    for chart in (
        "Turns per completion",
        "Calls of zoom",
        "Calls of mark",
        "Failed tool calls",
        "Tokens that came back",
    ):
        assert chart in page.text
    assert "A turn is what the policy writes before a tool or the environment answers." in page.text
    assert "of the tool calls failed" in page.text
    assert "crop(box=[900, 0, 100, 9]) failed: the box [900, 0, 100, 9] has no area" in page.text
    assert "thin: asked of a tool" in page.text and "right box" not in page.text and "image 2, " in page.text
    assert page.text.count("mine.py:Env, row 7: step: Traceback") == 1  # of two rewards
    assert "images/ has no readable file for it" in page.text
    assert "a picture that is not kept" in page.text


def test_nothing_hostile_gets_through_the_answers_of_tools(turns_run):
    page = page_of(turns_run)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count("<script>document.title='owned'</script>") >= 5  # a name, a key, a reason, two texts
    links = [value for name, value in page.attributes if name == "href" and value not in PLACES]
    assert all(link.startswith(("data:image/", "#image-")) for link in links)
    ids = [value for name, value in page.attributes if name == "id" and value.startswith("image-")]
    assert len(set(ids)) == len(ids) == sum(link.startswith("data:") for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_the_report_needs_no_torch():
    code = (
        "import sys; import tiercel.web.report; "
        "sys.exit(any(name.split('.')[0] in ('torch', 'transformers', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

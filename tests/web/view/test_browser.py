"""The page in a real browser: what it shows, follows, filters and compares; hostile rows; a server that is killed."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web.report.fake_runs import HOSTILE, make_grounding, make_sft, make_turns, write_lines
from tests.web.view.serving import Served, served
from tests.web.view.test_filters import write_step
from tiercel.runs.index import append_entry, file_entry
from tiercel.runs.json_lines import cut_lines
from tiercel.runs.records import groups_path
from tiercel.web.report import write_report
from tiercel.web.report.charts import Chart, Series, chart_numbers

pytestmark = pytest.mark.view

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("Playwright is not installed here; run `make test-view`")
    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


class Opened:
    """A page in the browser. Nothing may be reported on its console but what a test expects."""

    def __init__(self, browser, address: str, width: int = 1280, height: int = 900, **more):
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        self.page.goto(address)
        self.page.wait_for_selector("#connection.live" if address.startswith("http") else "main")

    def go(self, hash: str, wait: str) -> None:
        """Show a part of the page, and wait for an element of it."""
        self.page.evaluate("hash => { location.hash = hash }", hash)
        self.page.wait_for_selector(wait)

    def cards(self) -> list[str]:
        """Step and row of each card."""
        heads = self.page.locator(".item").evaluate_all(
            "items => items.map(each => `${each.dataset.step} ${each.querySelector('.to-row').dataset.row}`)"
        )
        return list(heads)

    def until(self, expression: str) -> None:
        """Wait until a condition holds on the page, whose policy refuses Playwright's own way to wait for one."""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(50)

    def until_told(self, words: str) -> None:
        """Wait until the console has said it."""
        deadline = time.monotonic() + 60
        while not any(words in each for each in self.problems):
            assert time.monotonic() < deadline, self.problems
            self.page.wait_for_timeout(50)


@pytest.fixture
def opened(browser) -> Iterator:
    contexts = []

    def open_page(address: str, **more) -> Opened:
        page = Opened(browser, address, **more)
        contexts.append(page)
        return page

    yield open_page
    problems = [each for page in contexts for each in page.problems]
    for page in contexts:
        page.context.close()
    assert problems == []


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    with_index(make_grounding(made / "grounding", steps=8, rows=16))
    with_index(make_grounding(made / "other", seed=5, steps=12, rows=8))
    config = made / "other" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 1.0e-05", "lr: 3.0e-05").replace("rank: 64", "rank: 16"))
    make_turns(made / "turns", steps=4)  # without an index, like runs of older versions
    make_sft(made / "sft", steps=30)
    return made


def with_index(run: Path) -> Path:
    for folder in ("rollouts", "evaluations"):
        for file in sorted((run / folder).iterdir()):
            append_entry(run, file_entry(run, folder, int(file.stem[5:])))  # type: ignore[arg-type]
    return run


@pytest.fixture(scope="module")
def shown(root, tmp_path_factory) -> Iterator[Served]:
    with served(root, state=tmp_path_factory.mktemp("state")) as found:
        yield found


def test_the_page_opens_with_the_curves_of_the_first_run(opened, shown):
    page = opened(shown.address)
    page.page.wait_for_selector(".chart")
    assert page.page.locator(".chart .title").first.inner_text() == "Held-out accuracy"
    assert page.page.locator(".whisker").count() > 0
    assert "grpo, 8 steps" in page.page.locator("#status").inner_text()
    page.page.locator(".chart svg").nth(1).hover()
    assert page.page.locator(".readout").nth(1).inner_text().startswith("step ")
    assert page.page.url.endswith(f"/{shown.token}/")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 60, ["0", "20", "40", "60"]),
        (0.03, 0.61, ["0", "0.2", "0.4", "0.6", "0.8"]),
        (-0.02, 0.02, ["\u22120.02", "\u22120.01", "0", "0.01", "0.02"]),
        (0, 1e-5, ["0", "5e\u22126", "1e\u22125"]),
        (0, 20000, ["0", "5k", "10k", "15k", "20k"]),
    ],
)
def test_ticks_are_round_numbers(opened, shown, low, high, labels):
    assert opened(shown.address).page.evaluate(f"tickLabels(niceTicks({low}, {high}, 4))") == labels


DRAWN = """chart => {
  const figure = document.createElement("figure");
  figure.innerHTML = '<figcaption><span class="title"></span><output class="readout"></output></figcaption>';
  figure.dataset.chart = JSON.stringify(chart);
  drawChart(figure);
  return [...figure.querySelectorAll("path")].map(each => [each.getAttribute("class"), each.getAttribute("d")]);
}"""


def test_lines_whiskers_and_layers_are_drawn_where_they_belong(opened, shown):
    page = opened(shown.address).page
    line = Series(label="l", points=tuple((step, float(step)) for step in range(5)))
    assert page.evaluate(DRAWN, chart_numbers(Chart(title="T", series=(line,))))[0][1].startswith("M46.0 176.0L")
    held_out = Series(label="h", points=((0, 0.25), (10, 0.5)), style="points", whiskers=((0, 0.0, 0.5), (10, 0.25, 1)))
    drawn = page.evaluate(DRAWN, chart_numbers(Chart(title="T", series=(held_out,), from_zero=True)))
    assert [style for style, _ in drawn] == ["thin c0", "whisker c0", "whisker c0"]
    assert drawn[1][1].startswith("M46 176V92M") and drawn[2][1].startswith("M370 134V8M")
    layers = tuple(Series(label="l", points=((1, 1.0), (2, top)), colour=at) for at, top in enumerate((1.0, 3.0)))
    upper, lower = page.evaluate(DRAWN, chart_numbers(Chart(title="T", series=layers, is_layered=True)))
    assert lower == ["area c0", "M46.0 134.0L370.0 134.0L370 176L46 176Z"]
    assert upper == ["area c1", "M46.0 92.0L370.0 8.0L370 176L46 176Z"]


def test_cards_have_pictures_boxes_completions_rewards_and_advantages(opened, shown):
    page = opened(shown.address)
    page.go("#rollouts?run=grounding", ".item")
    card = page.page.locator(".item").nth(3)
    assert "step 8" in card.locator(".to-step").inner_text()
    assert card.locator(".outline.truth").count() == 1 and card.locator(".outline.gained").count() > 0
    heads = card.locator("thead th").all_inner_texts()
    assert heads == ["", "iou", "format", "total", "advantage", "tokens", "box", "completion"]
    loaded = "async href => { const i = new Image(); i.src = href; await i.decode(); return i.naturalWidth }"
    href = card.locator("svg image").get_attribute("href")
    assert page.page.evaluate(loaded, href) > 50
    assert page.page.evaluate(loaded, page.page.locator(".item svg image").last.get_attribute("href")) > 50


def test_filters(opened, shown, root):
    page = opened(shown.address)
    page.go("#rollouts?run=grounding", ".item")
    field = page.page.locator
    assert field("#found").inner_text() == "32 groups"
    field("[name=steps]").fill("3")
    page.until("document.querySelector('#found').textContent === '4 groups'")
    assert {each.split()[0] for each in page.cards()} == {"3"}
    field("[name=steps]").fill("3-4")
    page.until("document.querySelector('#found').textContent === '8 groups'")
    field("[name=row]").fill("train-4-2")
    page.until("document.querySelector('#found').textContent === '1 groups'")
    assert page.cards() == ["4 train-4-2"]
    field("#clear").click()
    page.until("document.querySelector('#found').textContent === '32 groups'")

    field("[name=measure]").select_option("format")
    field("[name=low]").fill("0.99")
    page.until("document.querySelector('#found').textContent !== '32 groups'")
    means = [
        (step, group["id"])
        for step in range(1, 9)
        for group in read(root / "grounding", step)
        if mean([each["rewards"]["format"] for each in group["completions"]]) >= 0.99
    ]
    assert field("#found").inner_text() == f"{len(means)} groups"
    field("[name=low]").fill("often")
    page.until("document.querySelector('#found.bad') !== null")
    assert "often is not a number" in field("#found").inner_text()
    assert page.problems.pop().startswith("Failed to load resource")  # the browser notes the refusal
    field("#clear").click()
    page.until("document.querySelector('#found').textContent === '32 groups'")

    field("[name=order]").select_option("lucky")
    page.until("document.querySelector('#found').textContent !== '32 groups'")
    for text in field(".item-numbers").all_inner_texts():
        assert re.search(r"\b1 of \d right", text)
    assert page.page.evaluate("location.hash").count("order=lucky") == 1  # the address can be shared


def read(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in groups_path(run, "rollouts", step).read_text().splitlines()]


def mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def test_a_text_is_searched_in_all_files(opened, shown):
    page = opened(shown.address)
    page.go("#rollouts?run=grounding", ".item")
    page.page.locator("[name=text]").fill("I cannot see it, sorry")
    page.until("/^[1-9].* found; 32 of 32 groups searched$/.test(document.querySelector('#found').textContent)")
    assert all("sorry" in text for text in page.page.locator(".item").all_inner_texts())
    assert page.page.evaluate("CSS.highlights.get('found').size") >= page.page.locator(".item").count()
    page.page.locator("[name=text]").fill("words that nobody wrote")
    page.until("document.querySelector('#found').textContent === '0 found; 32 of 32 groups searched'")
    assert page.cards() == []


def test_a_run_without_an_index_is_read_in_the_background(opened, shown):
    page = opened(shown.address)
    page.go("#rollouts?run=turns", ".item .turns")
    page.until("document.querySelector('#found').textContent === '16 groups'")
    assert page.page.locator(".came-back svg image").count() > 0


def test_more_cards_come_at_the_end_of_the_page(opened, shown):
    page = opened(shown.address)
    page.go("#rollouts?run=grounding&order=oldest", ".item")
    expected = [f"{step} train-{step}-{number}" for step in range(1, 9) for number in range(4)]
    while (count := len(page.cards())) < len(expected):
        page.page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        page.until(f"document.querySelectorAll('.item').length > {count}")
    assert page.cards() == expected


def test_one_row_through_all_its_steps(opened, shown):
    page = opened(shown.address)
    page.go("#rollouts?run=grounding&folder=evaluations&row=val-3", ".item")
    assert [each.split()[0] for each in page.cards()] == ["8", "4", "0"]
    page.page.locator(".to-row").first.click()
    page.page.wait_for_selector(".answers-by-step")
    assert page.page.locator("h2").first.inner_text() == "val-3"
    assert page.page.locator(".answers-by-step tbody th").all_inner_texts() == ["0", "4", "8"]
    assert page.page.locator(".tally").count() >= 3
    page.page.locator(".to-group").nth(1).click()
    page.until("document.querySelectorAll('.item').length === 1")
    assert page.cards() == ["4 val-3"]
    page.page.go_back()
    page.page.wait_for_selector(".answers-by-step")
    page.page.locator(".to-step").first.click()  # for its newest group: all held-out rows of that step
    page.until("document.querySelector('#found').textContent === '16 groups'")
    assert {each.split()[0] for each in page.cards()} == {"8"}


def test_hostile_rows_are_inert(opened, tmp_path):
    run = with_index(make_grounding(tmp_path / "<img src=x onerror=alert(1)>", steps=2, rows=4))
    with (run / "bad_rows.jsonl").open("a") as file:
        file.write(json.dumps({"id": HOSTILE, "reason": HOSTILE}) + "\n")
    write_step(
        run, 3, {f"row {HOSTILE}": [1.0, 0.0], "</option></select><script>alert(2)</script>": [0.0]}, text=HOSTILE
    )
    tokens = {
        "texts": [HOSTILE, "'><script>alert(3)</script>"],
        "logprobs": [-3.0, None],
        "entropies": None,
        "gaps": None,
    }
    write_lines(run / "tokens" / "step-000003.jsonl", [{"index": 0, "completions": [tokens, tokens]}])
    (run / "pulse").mkdir()
    (run / "pulse" / "rank-0.json").write_text(
        json.dumps({"rank": 0, "phase": HOSTILE, "rows": [HOSTILE], "step": HOSTILE})
    )
    with served(run, state=tmp_path) as found:
        page = opened(found.address)
        page.page.wait_for_selector(".chart")
        for hash, wait in (
            ("#rollouts", ".item"),
            (f"#rollouts?text={'%3Cscript%3E'}", ".item"),
            ("#heldout", ".card"),
            ("#ranks", ".ranks"),
            ("#details", "#rejected"),
        ):
            page.go(hash, wait)
            assert page.page.locator("main img, main script, main iframe, #bar img").count() == 0
        page.go("#rollouts?order=newest", ".item")
        page.page.locator(".to-row").first.click()
        page.page.wait_for_selector(".answers-by-step")
        assert page.page.locator("h2").first.inner_text().startswith("row <script>")
        assert "owned" not in page.page.title()
        # Even markup that got through could not run a script.
        page.page.evaluate("document.querySelector('main').innerHTML = '<img src=x onerror=\"window.owned = 1\">'")
        page.until_told("Content Security Policy")
        assert page.page.evaluate("window.owned") is None
        page.problems.clear()


def test_the_page_follows_a_run_that_writes(opened, tmp_path):
    source = with_index(make_grounding(tmp_path / "source", steps=6, rows=8))
    run = tmp_path / "run"
    shutil.copytree(source, run, ignore=lambda folder, names: names if folder.endswith("rollouts") else [])
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:1]))
    (run / "index.jsonl").write_text("")
    with served(run, state=tmp_path) as found:
        page = opened(found.address)
        page.page.wait_for_selector(".chart")
        page.until("document.querySelector('#status').textContent.includes('0 of 6 steps')")
        other = opened(found.address)
        other.go("#rollouts", "#found")
        for step in (1, 2, 3):
            shutil.copy(groups_path(source, "rollouts", step), groups_path(run, "rollouts", step))
            append_entry(run, file_entry(run, "rollouts", step))
            with (run / "metrics.jsonl").open("a") as file:
                file.write(lines[step])
            page.until(f"document.querySelector('#status').textContent.includes('{step} of 6 steps')")
            other.until(f"document.querySelector('.item')?.dataset.step === '{step}'")
        page.until("[...document.querySelectorAll('.chart .title')].some(each => each.textContent === 'Reward')")
        other.until("document.querySelectorAll('.item.fresh').length === 4")

        other.page.keyboard.press("j")  # someone who reads a card keeps it, and is told about news
        shutil.copy(groups_path(source, "rollouts", 4), groups_path(run, "rollouts", 4))
        append_entry(run, file_entry(run, "rollouts", 4))
        other.page.wait_for_selector("#pill:not([hidden])")
        assert other.page.locator(".item").first.get_attribute("data-step") == "3"
        other.page.click("#pill")
        other.until("document.querySelector('.item')?.dataset.step === '4'")

        for step in (2, 3, 4):  # the run is resumed from the checkpoint of step 1
            groups_path(run, "rollouts", step).unlink()
        temporary = run / "metrics.new"
        temporary.write_text("".join(lines[:2]))
        temporary.replace(run / "metrics.jsonl")
        cut_lines(run / "index.jsonl", 1)
        other.until("document.querySelector('.item')?.dataset.step === '1'")
        page.until("document.querySelector('#status').textContent.includes('1 of 6 steps')")


def test_ranks_and_their_pulse(opened, tmp_path):
    run = make_sft(tmp_path / "run", steps=4)
    (run / "pulse").mkdir()
    sign = {"phase": "learn", "step": 4, "rows": ["row-7"], "waits_in": None, "quiet_seconds": 0.5}
    sign |= {"limit_seconds": 600, "host": "node", "process": 7}
    for rank in (0, 1):
        (run / "pulse" / f"rank-{rank}.json").write_text(json.dumps({**sign, "rank": rank}))
    with served(run, state=tmp_path) as found:
        page = opened(found.address)
        page.go("#ranks", ".ranks tbody tr")
        assert page.page.locator(".ranks tbody tr").count() == 2
        assert "learn" in page.page.locator("#status").inner_text()
        assert page.page.locator(".times tbody tr").count() > 4
        waiting = {**sign, "rank": 1, "phase": "sync", "waits_in": "sum of loss"}
        (run / "pulse" / "rank-1.json").write_text(json.dumps(waiting))
        page.until("document.querySelector('.ranks').textContent.includes('sum of loss')")
        for rank in (0, 1):
            (run / "pulse" / f"rank-{rank}.json").unlink()
        page.until("document.querySelector('#ranks').textContent.includes('No rank is at work')")


def test_runs_side_by_side(opened, shown):
    page = opened(shown.address)
    page.go("#compare", "#curves .chart")
    assert page.page.locator("#picker input:checked").count() == 4
    for name in ("turns", "sft"):
        page.page.uncheck(f"#picker input[value={name}]")
    page.until("document.querySelectorAll('#verdicts tbody tr').length === 2")
    reward = page.page.locator(".chart", has=page.page.locator(".title", has_text=re.compile("^Reward$")))
    assert reward.locator("path.c0").count() > 0 and reward.locator("path.c1").count() > 0
    assert reward.locator(".legend li").all_inner_texts() == [
        "grounding", "grounding, held out", "other", "other, held out"
    ]  # fmt: skip
    keys = page.page.locator("#differences tbody th").all_inner_texts()
    assert keys == ["lora.rank", "optim.lr", "train.steps"]
    assert page.page.locator("#differences tbody tr").nth(0).locator("td").all_inner_texts() == ["64", "16"]


def test_a_server_that_is_killed_and_comes_back(opened, root, tmp_path):
    with served(root, state=tmp_path) as first:
        page = opened(first.address)
        page.go("#rollouts?run=grounding&order=worst&steps=2-5", ".item")
        before = page.cards()
        first.process.kill()
        first.process.wait()
        page.page.wait_for_selector("#connection.lost")
        assert page.cards() == before  # what was there stays readable
        with served(root, state=tmp_path, port=first.port):
            page.page.wait_for_selector("#connection.live")
            page.until("document.querySelectorAll('.item').length > 0 && !document.querySelector('.loading')")
            assert page.cards() == before and page.page.input_value("[name=steps]") == "2-5"
            page.page.locator("[name=steps]").fill("2")
            page.until("document.querySelector('#found').textContent === '4 groups'")
    page.problems[:] = [each for each in page.problems if "ERR_" not in each]  # the browser notes the failed requests


def test_keys(opened, shown):
    page = opened(shown.address)
    press, focus = (
        page.page.keyboard.press,
        "document.activeElement.closest('.item')?.querySelector('.to-row').dataset.row",
    )
    page.page.wait_for_selector(".chart")
    press("2")
    page.page.wait_for_selector(".item")
    for key, expected in (
        ("j", "train-8-0"), ("j", "train-8-1"), ("k", "train-8-0"), ("k", "train-8-0"),
        ("n", "train-7-0"), ("j", "train-7-1"), ("p", "train-8-0"), ("p", "train-8-0"), ("n", "train-7-0"),
    ):  # fmt: skip
        press(key)
        assert page.page.evaluate(focus) == expected
    press("g")
    page.until("scrollY === 0 && !document.querySelector('.loading')")
    press("j")
    press("Enter")
    page.page.wait_for_selector("h2")
    page.until("location.hash.startsWith('#row')")
    press("/")
    page.until("document.activeElement.name === 'text'")
    page.page.keyboard.type("jn?2")  # letters in a field are letters
    assert page.page.input_value("[name=text]") == "jn?2"
    press("Escape")
    press("Escape")
    page.until("document.querySelector('[name=text]').value === ''")
    press("?")
    assert page.page.locator("#help").is_visible()
    press("Escape")
    assert not page.page.locator("#help").is_visible()


def test_tokens_are_coloured_as_the_reader_chooses(opened, tmp_path):
    run = with_index(make_grounding(tmp_path / "run", steps=2, rows=4))
    groups = read(run, 2)
    for number, group in enumerate(groups):
        group["index"] = number
        group["completions"][0]["text"] = "one two three"
    write_lines(groups_path(run, "rollouts", 2), groups)
    token = {"texts": ["one", " two", " three"], "logprobs": [-0.01, -1.0, -5.0]}
    token |= {"entropies": [0.0, 2.5, None], "gaps": [0.1, -0.3, 0.0]}
    count = len(groups[2]["completions"])
    write_lines(run / "tokens" / "step-000002.jsonl", [{"index": 2, "completions": [token] * count}])
    (run / "index.jsonl").unlink()
    with_index(run)
    with served(run, state=tmp_path) as found:
        page = opened(found.address)
        page.go("#rollouts?steps=2", ".item mark.token")
        card = page.page.locator(".item").nth(2)
        assert page.page.locator(".item .colours").count() == 1
        options = card.locator(".colours option").all_inner_texts()
        assert [each.split(" (")[0] for each in options] == [
            "no colours",
            "unlikely tokens",
            "open choices",
            "engine gap",
        ]
        marks = card.locator("pre.marked").first.locator("mark")
        colours = "marks => marks.map(each => getComputedStyle(each).backgroundColor)"
        clear = marks.evaluate_all(colours)
        assert len(set(clear)) == 1
        card.locator(".colours").select_option("logprob")
        plain, weak, strong = marks.evaluate_all(colours)
        assert plain == clear[0] and len({plain, weak, strong}) == 3
        assert "logprob -5.000" in (marks.nth(2).get_attribute("title") or "")
        page.page.locator("#found").click()  # keys are for the page if no field has the focus
        page.page.keyboard.press("c")
        assert card.locator(".colours").input_value() == "entropy"
        card.locator(".colours").select_option("gap")
        up, down, none = marks.evaluate_all(colours)
        assert len({up, down, none}) == 3


@pytest.mark.parametrize("tab", ["curves", "rollouts", "heldout", "ranks", "details", "compare", "row"])
def test_a_phone_needs_no_sideways_scrolling(opened, shown, tab):
    page = opened(shown.address, width=390, height=844, is_mobile=True, has_touch=True)
    waits = {"curves": ".chart", "rollouts": ".item", "heldout": ".card", "ranks": ".times", "details": "#recipe"}
    waits |= {"compare": "#curves .chart", "row": ".tally"}
    page.go(f"#{tab}?run=grounding&id=val-1", waits[tab])
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    if tab == "rollouts":
        assert not page.page.locator("[name=row]").is_visible()
        page.page.click("#more-filters")
        assert page.page.locator("[name=row]").is_visible()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(opened, shown, scheme):
    page = opened(shown.address, color_scheme=scheme)
    page.page.wait_for_selector(".chart")
    shade = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", shade)[0])
    assert red > 200 if scheme == "light" else red < 60


@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_is_the_same_page_without_a_server(opened, root, width):
    file = write_report(root / "grounding")
    page = opened(file.as_uri(), width=width)
    assert page.page.locator("#curves .chart svg").count() > 5 and page.page.locator(".whisker").count() > 0
    waits = {
        "rollouts": ".item .outline",
        "heldout": ".changes",
        "ranks": ".times",
        "details": "#recipe",
        "curves": ".tiles",
    }
    for tab, wait in waits.items():
        page.page.click(f"nav [data-tab={tab}]")
        page.page.wait_for_selector(wait)
        assert page.page.locator(".tab:visible").count() == 1
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.page.keyboard.press("/")
    page.until("document.activeElement.name === 'text'")
    page.page.keyboard.type("train-8-")
    page.until("/^[1-9] of the [0-9]+ groups on this page$/.test(document.querySelector('#found').textContent)")
    assert all("train-8-" in text for text in page.page.locator(".item:visible").all_inner_texts())


def test_the_report_can_be_read_without_javascript(opened, root):
    page = opened(write_report(root / "turns").as_uri(), java_script_enabled=False)
    assert page.page.locator(".tab:visible").count() == 5 and page.page.locator(".came-back").count() > 0
    assert "drawn by the page's own JavaScript" in page.page.locator("noscript").first.inner_text()


def test_a_hostile_report_is_inert(opened, tmp_path):
    run = make_grounding(tmp_path / "run", steps=2, rows=4)
    write_step(run, 3, {f"row {HOSTILE}": [1.0, 0.0], "</script><script>alert(2)</script>": [0.0]}, text=HOSTILE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, f"reward/{HOSTILE}</script>/mean": 0.5}) + "\n")
    page = opened(write_report(run).as_uri())
    assert page.page.locator("main img, main script, main iframe, #bar img").count() == 0
    titles = page.page.locator(".chart .title").all_inner_texts()
    assert any(title.startswith("Reward <script>document.title='owned'</script><img") for title in titles)
    page.page.evaluate("document.querySelector('main').innerHTML = '<img src=x onerror=\"window.owned = 1\">'")
    page.until_told("Content Security Policy")
    assert page.page.evaluate("window.owned") is None and "owned" not in page.page.title()
    page.problems.clear()

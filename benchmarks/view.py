"""The page of `tiercel view` on a long run: first paint, filters, a search, and the memory of its server.

    make bench-view
    .venv-view/bin/python -m benchmarks.view --steps 2000 --bytes 200000000

A made-up run of 10,000 steps has 80,000 groups of 8 completions, and 1 GB of rollouts. Chromium opens the page five
times, each time with a new server. Then one page requests what readers request, five times each, measured from the
change of a field to the new cards on the page. The rollouts are in the file cache, as they are while a run writes them.
Finally, the run's index is removed and the server itself reads all files. Writes benchmarks/results/view.json and
view.md.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.drivers.long_run import NEEDLE, add_step, make_long_run
from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, write_results
from tests.web.view.serving import Served, served
from tests.web.view.test_browser import CHROMIUM, FLAGS

AGAIN = 5
FILTERS: dict[str, tuple[str, dict[str, str]]] = {
    "reward from 0.9 (mean)": ("", {"low": "0.9"}),
    "one step of the middle": ("", {"steps": "5000"}),
    "one row": ("", {"row": "row-77"}),
    "worst first": ("order=worst", {}),
    "luckiest": ("order=lucky", {}),
    "text in every answer": ("", {"text": "several things"}),
    "text in one of 3,200 groups, first 10": ("", {"text": NEEDLE}),
    "text that is nowhere, all files": ("", {"text": "an owl that nobody saw"}),
}
SHOWN = "!document.querySelector('.loading') && document.querySelector('#found').textContent !== ''"


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        run, state = Path(folder) / "run", Path(folder) / "state"
        make_long_run(run, given.steps, given.bytes)
        size = sum(file.stat().st_size for file in (run / "rollouts").iterdir())
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            opened = [_opening(browser, run, state) for _ in range(AGAIN)]
            filters, memory, delay = _filters(browser, run, state, given.steps)
            without = _without_index(browser, run, state)
            browser.close()
    results = {
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "steps": given.steps,
        "rollout_bytes": size,
        "opening_seconds": {name: _spread([each[name] for each in opened]) for name in opened[0]},
        "filter_seconds": {name: _spread(values) for name, values in filters.items()},
        "new_step_seconds": _spread(delay),
        "server_memory_bytes": memory,
        "without_index": without,
    }
    write_results(RESULTS / "view.json", results, _markdown(results))
    print(_markdown(results))


def _opening(browser, run: Path, state: Path) -> dict[str, float]:
    """Open the page of a new server, and return the seconds from the start of its process and from the request of the
    page."""
    started = time.monotonic()
    with served(run, state=state) as found:
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        asked = time.monotonic()
        page.goto(found.address, wait_until="commit")
        _until(page, "document.querySelector('.chart') !== null")
        curves = time.monotonic() - asked
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        asked_for_cards = time.monotonic()
        page.evaluate("location.hash = '#rollouts'")
        _until(page, "document.querySelector('.item') !== null")
        cards = time.monotonic() - asked_for_cards
        page.context.close()
        return {
            "server answers, from its start": asked - started,
            "first paint, from the request": paint,
            "curves, from the request": curves,
            "cards, from the click on Rollouts": cards,
        }


def _filters(browser, run: Path, state: Path, steps: int) -> tuple[dict[str, list[float]], dict[str, int], list[float]]:
    with served(run, state=state) as found:
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(found.address)
        page.wait_for_selector(".chart")
        taken: dict[str, list[float]] = {name: [] for name in FILTERS}
        for _ in range(AGAIN):
            for name, (hash, fields) in FILTERS.items():
                taken[name].append(_asked(page, "&".join([hash, *(f"{key}={fields[key]}" for key in fields)])))
        page.evaluate("location.hash = '#rollouts'")
        delays = []
        for number in range(AGAIN):
            _until(page, SHOWN)
            written = time.monotonic()
            add_step(run, steps + 1 + number)
            _until(page, f"document.querySelector('.item')?.dataset.step === '{steps + 1 + number}'")
            delays.append(time.monotonic() - written)
        memory = {"now": _memory(found, "VmRSS"), "most": _memory(found, "VmHWM")}
        page.context.close()
        return taken, memory, delays


def _asked(page: Page, query: str) -> float:
    """Request cards, and return the seconds until they are there."""
    page.evaluate("location.hash = '#details'")
    page.wait_for_selector("#recipe")
    begun = time.monotonic()
    page.evaluate(
        "query => { document.querySelector('#found').textContent = ''; location.hash = query }", f"#rollouts?{query}"
    )
    _until(page, SHOWN)
    return time.monotonic() - begun


def _without_index(browser, run: Path, state: Path) -> dict[str, Any]:
    """Open a run whose index is gone, and return the times of the first cards, of all groups, and the longest that
    another part took meanwhile."""
    (run / "index.jsonl").unlink()
    with served(run, state=state) as found:
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        begun = time.monotonic()
        page.goto(f"{found.address}#rollouts")
        page.wait_for_selector(".item", timeout=60_000)
        first = time.monotonic() - begun
        answers = []
        while page.evaluate("document.querySelector('#found').textContent.includes('still being read')"):
            asked = time.monotonic()
            page.evaluate("fetch('status?run=run').then((answer) => answer.text())")
            answers.append(time.monotonic() - asked)
            page.wait_for_timeout(500)
        whole = time.monotonic() - begun
        memory = _memory(found, "VmHWM")
        page.context.close()
    return {
        "first_cards_seconds": first,
        "all_seconds": whole,
        "longest_answer_seconds": max(answers),
        "memory": memory,
    }


def _until(page: Page, condition: str) -> None:
    """Wait with short pauses, because Playwright's own waiting looks again only after up to half a second."""
    while not page.evaluate(condition):
        time.sleep(0.005)


def _memory(found: Served, key: str) -> int:
    status = Path(f"/proc/{found.process.pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(key))


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def _markdown(results: dict[str, Any]) -> str:
    rows = [
        (name, *(f"{spread[key]:.2f}" for key in ("median", "min", "max")))
        for name, spread in {
            **results["opening_seconds"],
            **results["filter_seconds"],
            "a new step, from its writing to its card": results["new_step_seconds"],
        }.items()
    ]
    memory, without = results["server_memory_bytes"], results["without_index"]
    return (
        f"A run of {results['steps']:,} steps with {results['rollout_bytes'] / 1e9:.2f} GB of rollouts; load average "
        f"{results['load_average']:.1f} on {results['machine']['cores']} cores.\n\n"
        + markdown_table(("seconds", "median", "least", "most"), rows)
        + f"\nMemory of the server (resident): {memory['now'] / 1e6:.0f} MB, at most {memory['most'] / 1e6:.0f} MB. "
        f"Without an index: first cards after {without['first_cards_seconds']:.1f} s, all files read after "
        f"{without['all_seconds']:.0f} s, no other answer slower than {without['longest_answer_seconds']:.2f} s "
        f"meanwhile, at most {without['memory'] / 1e6:.0f} MB.\n"
    )


if __name__ == "__main__":
    main()

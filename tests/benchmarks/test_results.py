"""The documents quote what was measured."""

import json
from pathlib import Path

from benchmarks.gpu.report import NOT_MEASURED, markdown, summary
from benchmarks.gpu.results import Results
from benchmarks.gpu_memory import LIMIT, PHASES, difference
from benchmarks.gpu_memory import markdown as table_of_memory
from benchmarks.learner import table
from benchmarks.pairs import table as table_of_pairs
from benchmarks.peers_report import markdown_table
from benchmarks.quote import PAGES, QUOTED, quoted
from benchmarks.rows import table as table_of_rows
from benchmarks.trees import table as table_of_trees
from benchmarks.turns import table as table_of_turns

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_pages_quote_the_results_as_they_are():
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [len(QUOTED.findall(page)) for page in pages] == [11, 3]
    assert [quoted(page) for page in pages] == pages


def test_the_figures_of_readme_are_those_of_the_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (RESULTS / "peers.md").read_text(encoding="utf-8").splitlines()
    for peer, seconds in (("ms-swift 4.6.0", "81.1 s"), ("TRL 1.16.0, head as on a GPU", "60.9 s")):
        (line,) = [line for line in lines if line.startswith(f"| {peer} | 1186, 128, 8, 1 | 152,064 ")]
        assert "| 12.4 s (" in line and f"| {seconds} (" in line
        assert seconds in readme and "| 12.4 s |" in readme


def test_tables_are_made_from_the_results():
    for name in ("peers", "peers_pictures"):
        peers = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == markdown_table(peers)
    learner = json.loads((RESULTS / "learner.json").read_text(encoding="utf-8"))
    assert (RESULTS / "learner.md").read_text(encoding="utf-8") == table(learner["cells"])
    pairs = json.loads((RESULTS / "pairs.json").read_text(encoding="utf-8"))
    assert (RESULTS / "pairs.md").read_text(encoding="utf-8") == table_of_pairs(pairs["cells"])
    rows = json.loads((RESULTS / "rows.json").read_text(encoding="utf-8"))
    assert (RESULTS / "rows.md").read_text(encoding="utf-8") == table_of_rows(rows)
    trees = json.loads((RESULTS / "trees.json").read_text(encoding="utf-8"))
    assert (RESULTS / "trees.md").read_text(encoding="utf-8") == table_of_trees(trees)
    turns = json.loads((RESULTS / "turns.json").read_text(encoding="utf-8"))
    assert (RESULTS / "turns.md").read_text(encoding="utf-8") == table_of_turns(turns)


def test_the_plan_is_as_near_to_the_allocator_as_the_page_says():
    found = json.loads((RESULTS / "gpu_memory.json").read_text(encoding="utf-8"))["rows"]
    assert (RESULTS / "gpu_memory.md").read_text(encoding="utf-8") == table_of_memory(found)
    assert all(abs(difference(row, phase)) <= LIMIT for row in found for phase in PHASES)


def test_what_no_card_has_measured_is_said_so():
    rows = list(Results.read(RESULTS / "gpu.json").rows.values())
    assert (RESULTS / "gpu_summary.md").read_text(encoding="utf-8") == summary(rows)
    assert "CPU" not in {row["card"] for row in rows}  # a toy run's numbers are not results
    if rows:
        assert (RESULTS / "gpu.md").read_text(encoding="utf-8") == markdown(rows)
    else:
        assert summary(rows).count(NOT_MEASURED) == len(summary(rows).splitlines()) - 2

"""Counting of outcomes, and the results file."""

import json

from benchmarks.faults.__main__ import markdown, merged, rounded
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.child import collect
from benchmarks.faults.figure import figure_of
from benchmarks.tables import RESULTS


def test_outcomes_are_counted_and_the_first_failures_kept():
    outcomes = [("a", None), *((f"b{number}", "broke") for number in range(7))]
    figure = figure_of("fuzzed rows", outcomes, seed=3, seconds=1.5)
    assert (figure.passed, figure.attempted, figure.seed) == (1, 8, 3)
    assert figure.failures == tuple(f"b{number}: broke" for number in range(5))


def test_figures_take_the_place_of_those_of_the_same_fault():
    first, second, *_ = FAULTS
    old = [rounded(figure_of(name, [("a", "broke")], seed=0, seconds=1.0)) for name in (second, first)]
    new = figure_of(second, [("a", None)], seed=1, seconds=2.0, figures={"peak_mb": 12.0})
    results = merged({"faults": old}, [new])
    assert [(row["fault"], row["passed"]) for row in results["faults"]] == [(first, 0), (second, 1)]
    assert {"processor", "python"} <= set(results["machine"]) and "torch" in results["versions"]
    text = markdown(results["faults"])
    assert f"| {second} | 1/1 | 1 | 2.0 | peak mb 12 |" in text
    assert f"- {first}: a: broke" in text


def test_a_child_that_dies_or_hangs_says_how():
    def dies(send):
        send(1)
        raise SystemExit(7)

    def hangs(send):
        send(2)
        while True:
            pass

    assert collect(lambda send: send("done"), 10) == (["done"], None)
    assert collect(dies, 10) == ([1], "the process ended with 7")
    assert collect(hangs, 0.5) == ([2], "the process was not done after 0.5 s")


def test_the_table_is_made_from_the_results():
    results = json.loads((RESULTS / "faults.json").read_text(encoding="utf-8"))
    assert (RESULTS / "faults.md").read_text(encoding="utf-8") == markdown(results["faults"])

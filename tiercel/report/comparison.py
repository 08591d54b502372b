"""A run beside another: both verdicts, the keys that differ in the recipes, and the held-out rows of both."""

from tiercel.plurals import counted
from tiercel.report.details import differences
from tiercel.report.heldout import Fate, counts_table, fates, pairs_of
from tiercel.report.markup import Html, element
from tiercel.report.reading import GroupFile, Run
from tiercel.report.verdict import headline

_WORDS: dict[Fate, str] = {
    "fixed": "right only here",
    "broken": "right only there",
    "right": "right in both",
    "wrong": "wrong in both",
    "better": "higher here",
    "worse": "higher there",
    "same": "the same",
}


def comparison_section(run: Run, other: Run, last: GroupFile | None, other_last: GroupFile | None) -> Html:
    """Compare two runs. `last` and `other_last` are their last evaluations, None where there is none."""
    counts = None
    if last is not None and other_last is not None and (pairs := pairs_of(other_last, last)):
        names = (f"in {other.name}", "in this run")
        counts = element(
            "div",
            element("p", f"The last evaluations of both, on the {counted(len(pairs), 'row')} that they share:"),
            counts_table(fates(pairs), names, _WORDS),
        )
    return element(
        "section",
        element("h2", f"Against {other.name}"),
        element("p", headline(other).replace("->", "→")),
        counts,
        element("h3", "What differs in the recipes"),
        differences(run, other),
        id="against",
    )

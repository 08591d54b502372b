"""Faults that showed in the metrics during the run; the log has the same warnings."""

from collections.abc import Sequence

from tiercel.reliability.diagnosis import Symptom
from tiercel.report.markup import Html, section, table


def symptoms_section(found: Sequence[Symptom]) -> Html | None:
    """Make a table of the faults, each with the step that showed it first; None where there was none."""
    rows = [(f"{each.step:,}", each.text, each.cause, each.recipe_key) for each in found]
    heads = ("step", "what", "likely cause", "look at")
    return section("findings", "Warnings on the way", table(rows, heads)) if rows else None

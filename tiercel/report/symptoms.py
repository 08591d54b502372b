"""Faults that showed in the metrics during the run; the log has the same warnings."""

from tiercel.reliability.diagnosis import symptoms
from tiercel.report.markup import Html, section, table
from tiercel.report.reading import Run


def symptoms_section(run: Run) -> Html | None:
    """Make a table of the faults, each with the step that showed it first; None where there was none."""
    rows = [(f"{each.step:,}", each.text, each.cause, each.recipe_key) for each in symptoms(run.metrics)]
    heads = ("step", "what", "likely cause", "look at")
    return section("findings", "Warnings on the way", table(rows, heads)) if rows else None

"""Faults that showed in the metrics during the run; the log has the same warnings."""

from tiercel.reliability.diagnosis import symptoms
from tiercel.report.markup import Html, element
from tiercel.report.reading import Run


def symptoms_section(run: Run) -> Html | None:
    """Make a table of the faults, each with the step that showed it first; None where there was none."""
    found = symptoms(run.metrics)
    if not found:
        return None
    header = element("tr", [element("th", text, scope="col") for text in ("step", "what", "likely cause", "look at")])
    rows = [
        element("tr", [element("td", text) for text in (f"{each.step:,}", each.text, each.cause, each.recipe_key)])
        for each in found
    ]
    table = element("table", element("thead", header), element("tbody", rows), class_="plain")
    return element(
        "section", element("h2", "Warnings on the way"), element("div", table, class_="scroll"), id="findings"
    )

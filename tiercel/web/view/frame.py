"""The page around the parts: its bar, the filters, the help, and the addresses of its style and script."""

from collections.abc import Sequence

from tiercel import __version__
from tiercel.web.report.markup import Html, element, fragment, table, trusted
from tiercel.web.view.filters import ORDERS

TABS = {
    "curves": "Curves",
    "rollouts": "Rollouts",
    "heldout": "Held out",
    "ranks": "Ranks and time",
    "details": "Data and recipe",
    "compare": "Compare",
}
KEYS = (
    ("j, k", "next and previous card"),
    ("n, p", "first card of the next step, and of the one before"),
    ("Enter", "all steps of the card's row"),
    ("c", "next way to colour tokens"),
    ("/", "search in the texts"),
    ("1 to 6", "the parts of the page"),
    ("g", "back to the top, to the newest"),
    ("Esc", "leave a field; clear the filters"),
    ("?", "this help"),
)
_FOLDERS = {"rollouts": "sampled", "evaluations": "held out"}


def page(runs: Sequence[str]) -> str:
    """Make the page that the script fills. `runs`: their names."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"tiercel {__version__}"),
        element("title", "tiercel view"),
        element("link", rel="icon", href="icon.svg"),
        [element("link", rel="stylesheet", href=name) for name in ("report.css", "view.css")],
        [element("script", src=name, defer=True) for name in ("charts.js", "report.js", "view.js")],
    )
    body = element("body", _bar(runs), _filters(), element("main", _without_script(), id="view"), _help(), _pill())
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _bar(runs: Sequence[str]) -> Html:
    tabs = [element("a", text, href=f"#{name}", data_tab=name) for name, text in TABS.items()]
    return element(
        "header",
        element("div", element("b", "tiercel"), class_="brand"),
        element("select", run_options(runs), id="run", aria_label="run"),
        element("div", id="status", role="status"),
        element("div", "connecting", id="connection", role="status"),
        element("button", "?", type="button", id="open-help", title="keys"),
        element("nav", tabs, aria_label="parts"),
        id="bar",
    )


def _filters() -> Html:
    """Make the fields that say which rollouts are shown; the names of the fields are those of the address."""

    def field(name: str, label: str, kind: str = "text", **more: str) -> Html:
        return element("label", label, element("input", name=name, type=kind, autocomplete="off", **more))

    def chooser(name: str, label: str, options: dict[str, str]) -> Html:
        made = [element("option", text, value=value) for value, text in options.items()]
        return element("label", label, element("select", made, name=name))

    return element(
        "form",
        chooser("folder", "Rows", _FOLDERS),
        chooser("order", "Show", dict(ORDERS)),
        chooser("measure", "Reward", {"mean": "mean", "best": "best", "worst": "worst"}),
        field("low", "from", inputmode="decimal", placeholder="any"),
        field("high", "to", inputmode="decimal", placeholder="any"),
        field("steps", "Step", placeholder="120 or 100-200", inputmode="text"),
        field("row", "Row id", placeholder="any"),
        field("text", "Text", "search", placeholder="in questions and answers"),
        element("button", "Filters", type="button", id="more-filters", aria_expanded="false"),
        element("button", "Clear", type="button", id="clear"),
        element("output", id="found"),
        id="filters",
        hidden=True,
    )


def _without_script() -> Html:
    return element("noscript", element("p", "This page needs JavaScript. report.html of a run does not."))


def _help() -> Html:
    rows = [(element("th", element("kbd", keys), scope="row"), text) for keys, text in KEYS]
    close = element("form", element("button", "Close"), method="dialog")
    return element("dialog", element("h3", "Keys"), table(rows), close, id="help")


def _pill() -> Html:
    return element("button", "New rollouts: show", type="button", id="pill", hidden=True)


ICON = trusted(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M2 12 6 6l3 4 5-8" fill="none" '
    'stroke="#2f7de1" stroke-width="2.4" stroke-linejoin="round" stroke-linecap="round"/></svg>'
)


def run_options(names: Sequence[str]) -> Html:
    """List the runs for the bar."""
    return fragment([element("option", name, value=name) for name in names])

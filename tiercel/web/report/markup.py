"""HTML that is always escaped: text becomes part of a page only through `element`."""

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"br", "meta", "link", "input"})
_SELF_CLOSING = frozenset({"rect", "line", "path", "circle", "image"})  # of SVG, where they have no children
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
# What no HTML file may hold: half of a surrogate pair, DEL to APC, and the two noncharacters.
_UNPRINTABLE = re.compile("[\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# These reverse the rest of a line, so that a reader would see other text than the file holds.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
_FIRST_CONTROL_PICTURE = 0x2400


class Html(str):
    """Markup that needs no further escaping; only this module makes it from text."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def escaped(text: str) -> Html:
    """Escape text of any origin as HTML.

    Control characters are shown as their pictures (from U+2400 on), overrides of the writing direction as numbers, and
    characters that HTML may not hold as U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    text = _CONTROL.sub(lambda found: chr(_FIRST_CONTROL_PICTURE + ord(found.group())), text)
    text = _DIRECTION.sub(lambda found: f"[U+{ord(found.group()):04X}]", text)
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def trusted(markup: str) -> Html:
    """Take over markup that this package wrote itself: its style sheet and its script."""
    return Html(markup)


def fragment(*children: Child) -> Html:
    """Join children. Plain strings are escaped; None is left out."""
    return Html("".join(_pieces(children)))


def element(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """Make <name attributes>children</name>.

    A trailing underscore of an attribute is dropped (`class_`); other underscores become hyphens (`stroke_width`). None
    and False leave an attribute out; True writes it without a value.
    """
    opening = "".join([name, *(_attribute(key, value) for key, value in attributes.items())])
    content = fragment(*children)
    if name in _VOID:
        assert not content, f"<{name}> has no content"
        return Html(f"<{opening}>")
    return Html(f"<{opening}/>" if name in _SELF_CLOSING and not content else f"<{opening}>{content}</{name}>")


def section(id: str, title: str, *children: Child) -> Html:
    """Make a part of the page with its heading."""
    return element("section", element("h2", title), children, id=id)


def aside(text: Child) -> Html | None:
    """Make a remark; None without text."""
    return element("p", text, class_="aside") if text else None


def table(rows: Iterable[Iterable[Child]], heads: Iterable[str] = (), style: str = "plain", around: str = "") -> Html:
    """Make a table that scrolls by itself where it is wide. A row is markup, or its cells; text becomes a cell.
    `around`: further classes of what scrolls."""
    columns = [head if isinstance(head, Html) else element("th", head, scope="col") for head in heads]
    body = [row if isinstance(row, Html) else element("tr", map(_cell, row)) for row in rows]
    top = element("thead", element("tr", columns)) if columns else None
    return element("div", element("table", top, element("tbody", body), class_=style), class_=f"scroll{around}")


def _cell(content: Child) -> Html:
    return content if isinstance(content, Html) else element("td", content)


def side_head(*children: Child) -> Html:
    """Make the first cell of a table's row, which says what the row is."""
    return element("th", *children, scope="row")


def legend(entries: Iterable[tuple[str, str]], *more: Child) -> Html:
    """List what the colours mean. `entries`: classes of the mark and its text; `more`: list items of another kind."""
    return element(
        "ul", [element("li", element("i", class_=mark), text) for mark, text in entries], more, class_="legend"
    )


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-") if key not in ("viewBox", "preserveAspectRatio") else key
    if value is True:
        return f" {name}"
    return f' {name}="{escaped(_number(value) if isinstance(value, float) else str(value))}"'


def _number(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _pieces(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str | int | float):
            yield escaped(str(child))
        else:
            yield from _pieces(child)

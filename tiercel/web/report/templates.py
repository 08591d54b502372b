"""The templates of the pages: text of any origin is escaped wherever it goes."""

import html
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from tiercel import __version__
from tiercel.message_text import counted
from tiercel.web.report import boxes, cards, charts, heldout, pictures, tokens, turns
from tiercel.web.report.numbers import NOTHING, TIMES, duration

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
# What no HTML file may hold: half of a surrogate pair, DEL to APC, and the two noncharacters.
_UNPRINTABLE = re.compile("[\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# These reverse the rest of a line, so that a reader would see other text than the file holds.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
_FIRST_CONTROL_PICTURE = 0x2400


def escaped(value: Any) -> Markup:
    """Escape text of any origin as HTML; markup that a template made stays, and None is nothing.

    Control characters are shown as their pictures (from U+2400 on), overrides of the writing direction as numbers, and
    characters that HTML may not hold as U+FFFD.
    """
    if isinstance(value, Markup):
        return value
    text = "" if value is None else str(value).replace("\r\n", "\n")
    text = _CONTROL.sub(lambda found: chr(_FIRST_CONTROL_PICTURE + ord(found.group())), text)
    text = _DIRECTION.sub(lambda found: f"[U+{ord(found.group()):04X}]", text)
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def drawn(template: str, **values: Any) -> Markup:
    """Fill in a template."""
    return Markup(environment().get_template(template).render(**values))


def _encoded(id: str) -> str:
    """Encode an id for the script: what is escaped for the eye would no longer be the id."""
    return quote(id, safe="", errors="replace")


def _tenth(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


@cache
def environment() -> Any:
    """Make the environment of the templates. The list of runs, which needs none, does without jinja2's import."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {"clipped": cards.clipped, "encoded": _encoded, "tenth": _tenth, "thousands": "{:,}".format}
    made.globals |= {
        "version": __version__,
        "TIMES": TIMES,
        "NOTHING": NOTHING,
        "counted": counted,
        "duration": duration,
    }
    modules = (boxes, cards, charts, heldout, pictures, tokens, turns)
    made.globals |= {module.__name__.rpartition(".")[2]: module for module in modules}
    return made

"""Make the table of docs/families.md from FAMILIES: `python -m tools.docs.families docs/families.md`."""

import sys
from pathlib import Path

from tiercel.models.family import Family
from tiercel.models.loading import FAMILIES, PROVED
from tiercel.types import CoordinateSpace
from tools.docs.tables import write_table

TABLE = "families"  # its name in the document
SPACES: dict[CoordinateSpace, str] = {
    "resized_pixels": "pixels of the resized image",
    "thousandths": "0 to 1000 of each side",
    "unit": "0 to 1 of each side",
}


def table() -> str:
    """Return the table, in Markdown: one row for each family."""
    lines = [
        "| name | models | boxes that it writes | positions | size of an image | what else is its own |",
        "|---|---|---|---|---|---|",
    ]
    for family in (*FAMILIES.values(), *PROVED):
        space = "none documented" if family.coordinate_space is None else SPACES[family.coordinate_space]
        cells = (f"`{family.name}`", family.serves, space, _positions(family), _size(family), family.special)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _positions(family: type[Family]) -> str:
    counts = {3: "M-RoPE: time, row, column", 1: "one number"}
    return counts.get(getattr(family, "position_dimensions", 0), "as the model's own code says")


def _size(family: type[Family]) -> str:
    if family.has_pixel_limits:
        return "`min_pixels`, `max_pixels`"
    return "tiles of one size" if family.sizes == Family.sizes else family.sizes


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), TABLE, table())

"""Make the table of docs/families.md from FAMILIES: `python -m tools.docs.families docs/families.md`."""

import sys
from pathlib import Path

from tiercel.models.loading import FAMILIES
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
    for name, family in FAMILIES.items():
        positions = "M-RoPE: time, row, column" if family.position_dimensions == 3 else "one number"
        size = "`min_pixels`, `max_pixels`" if family.has_pixel_limits else "tiles of one size"
        space = SPACES[family.coordinate_space]
        lines.append(f"| `{name}` | {family.serves} | {space} | {positions} | {size} | {family.special} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), TABLE, table())

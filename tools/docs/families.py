"""Generate the tables of docs/families.md from FAMILIES: `python -m tools.docs.families docs/families.md`."""

import sys
from pathlib import Path

from tiercel.models.families.base import Family
from tiercel.models.families.generic import AnyImageText
from tiercel.models.families.loading import FAMILIES, PROVED
from tiercel.models.families.text_only import TextOnly
from tiercel.types import CoordinateSpace
from tools.docs.recipe import Say
from tools.docs.tables import write_table

SPACES: dict[CoordinateSpace, str] = {
    "resized_pixels": "pixels of the resized image",
    "thousandths": "0 to 1000 of each side",
    "unit": "0 to 1 of each side",
}

ABILITIES = (
    "name",
    "models",
    "pictures",
    "several pictures",
    "videos",
    "completions share their prompt",
    "boxes that it writes",
    "vLLM with adapters",
)
OWN = ("name", "positions", "size of an image", "what else is its own")


def tables(say: Say = str) -> dict[str, str]:
    """Return the tables in Markdown by their names in the document, each with one row for each family. `say` translates
    texts."""
    can = [_line(*map(say, ABILITIES)), "|---|---|---|---|---|---|---|---|"]
    own = [_line(*map(say, OWN)), "|---|---|---|---|"]
    for family in (*FAMILIES.values(), *PROVED):
        seen = vars(family).get("vllm", Family.vllm)  # another architecture has no note of its own
        can.append(_line(f"`{family.name}`", *map(say, (family.serves, *_abilities(family), seen))))
        own.append(_line(f"`{family.name}`", *map(say, (_positions(family), _size(family), family.special))))
    return {name: "\n".join(lines) + "\n" for name, lines in (("families", can), ("sizes", own))}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _abilities(family: type[Family]) -> tuple[str, ...]:
    reads_pictures = family is not TextOnly
    pictures = "yes" if reads_pictures else "no"
    space = "-" if not reads_pictures else "by `data.coordinates`"
    if family.coordinate_space is not None:
        space = SPACES[family.coordinate_space]
    shares = "if its proof passes so" if family.needs_proof else "yes"
    return pictures, pictures, "no" if family.video_marker is None else "yes", shares, space


def _positions(family: type[Family]) -> str:
    if family is AnyImageText:
        return "as the model's own code says"
    return {3: "M-RoPE: time, row, column", 1: "one number"}[family.position_dimensions]


def _size(family: type[Family]) -> str:
    if family.has_pixel_limits:
        return "`min_pixels`, `max_pixels`"
    return "tiles of one size" if family.sizes == Family.sizes else family.sizes


if __name__ == "__main__":
    for name, table in tables().items():
        write_table(Path(sys.argv[1]), name, table)

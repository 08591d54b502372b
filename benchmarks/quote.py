"""Insert the measured tables into docs/benchmarks.md and docs/gpu.md, between the comments that name their files.

python -m benchmarks.quote
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/benchmarks.md", ROOT / "docs/gpu.md")
QUOTED = re.compile(r"(<!-- (benchmarks/results/\w+\.md) -->\n).*?(<!-- end -->)", re.DOTALL)


def quoted(text: str) -> str:
    """Return the text with every table in the current form of its file."""
    return QUOTED.sub(lambda match: match[1] + (ROOT / match[2]).read_text(encoding="utf-8") + match[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(quoted(page.read_text(encoding="utf-8")), encoding="utf-8")

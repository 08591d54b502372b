"""The pages of docs/, and the contents of their fenced blocks."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages(*folders: str) -> list[Path]:
    """The pages of folders of docs/, by name."""
    return [page for folder in folders for page in sorted((DOCS / folder).glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The texts of a page's fenced blocks of a language."""
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, each as its words."""
    return [shlex.split(line) for text in blocks(page, "sh") for line in text.splitlines() if line.strip()]

"""Results as Markdown and JSON, for the benchmarks of one framework alone."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def write_results(file: Path, results: Mapping[str, Any], markdown: str) -> None:
    """The JSON file, and beside it the tables under the same name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown, encoding="utf-8")


def versions(*engines: str) -> dict[str, str]:
    """What the numbers were computed with; torch with its local part, such as +cpu. `engines`: names of vLLM's
    distributions, of which the installed one counts."""
    found = {name: version(name) for name in ("torch", "transformers", "peft")}
    installed = {each.metadata["Name"] for each in distributions()}
    for name in engines:
        if name in installed:
            found["vllm"] = f"{version(name)} ({name})"
    return found

"""Results as Markdown and JSON, for the benchmarks of one framework."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the first column aligned to the left and all others to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def write_results(file: Path, results: Mapping[str, Any], markdown: str) -> None:
    """Write the JSON file, and next to it the tables under the same name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown, encoding="utf-8")


def versions(*engines: str) -> dict[str, str]:
    """Return the versions that the numbers were computed with, torch's with its local part, such as +cpu. `engines` are
    names of vLLM's distributions, of which the installed one is used."""
    found = {name: version(name) for name in ("torch", "transformers", "peft")}
    installed = {each.metadata["Name"] for each in distributions()}
    for name in engines:
        if name in installed:
            found["vllm"] = f"{version(name)} ({name})"
    return found

"""The files beside a model's weights: tokenizer, processors, generation config, and the template that was trained.

They are the checkpoint's, byte for byte, but for what the recipe has set: a server of the model then writes the prompts
that the run has learnt from.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercel.models.family import Family

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
TEMPLATE = "chat_template.jinja"
OWN_TEMPLATE = "chat_template"  # a key of older checkpoints' files
Config = dict[str, Any]


def write_companions(family: Family, directory: Path) -> None:
    """Write the files beside the weights of a family's model."""
    copy_files(Path(family.checkpoint.path), directory)
    if family.checkpoint.chat_template != family.tokenizer.chat_template:
        _write_template(family.checkpoint.chat_template, directory)
    if family.min_pixels is not None or family.max_pixels is not None:
        limited = {"shortest_edge": family.min_pixels, "longest_edge": family.max_pixels}
        given = {key: value for key, value in limited.items() if value is not None}
        _change(directory / "preprocessor_config.json", lambda config: _limit(config, given))
        _change(directory / "processor_config.json", lambda config: _limit(config.get("image_processor"), given))


def copy_files(source: Path, directory: Path) -> None:
    """Copy the files of tokenizer and processors, byte for byte."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _write_template(template: str, directory: Path) -> None:
    """Write the template to the file that is read before all others, and take it out of those."""
    (directory / TEMPLATE).write_text(template, encoding="utf-8")
    (directory / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        _change(directory / name, lambda config: config.pop(OWN_TEMPLATE, None))


def _limit(config: Config | None, edges: Config) -> None:
    """Set the limits of an image's pixels, by both of their names."""
    if config is None or "shortest_edge" not in (config.get("size") or {}):
        return
    config["size"] |= edges
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if name in config and edge in edges:
            config[name] = edges[edge]


def _change(file: Path, change: Callable[[Config], Any]) -> None:
    """Change a JSON file where it is there and where the change is one."""
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    config = json.loads(text)
    before = json.dumps(config)
    change(config)
    if json.dumps(config) != before:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""What the names in a recipe stood for when a checkpoint was written: models of a hub, pictures, held-out rows."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from os.path import expanduser, isdir
from typing import Any

from tiercel.config.schema import BaseRecipe
from tiercel.data.picture_files import digest_of_pictures
from tiercel.data.row_table import RunRows
from tiercel.distributed.agreement import models_beside
from tiercel.errors import EnvironmentProblem, ModelError, RunError
from tiercel.log import logger
from tiercel.models.weights.hub import resolve
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.identity import digest_of

NAMED = "content"  # in a checkpoint's state
_COMMIT = re.compile("[0-9a-f]{40}")


def content_of(recipe: BaseRecipe, rows: RunRows, beat: Callable[[], None]) -> dict[str, Any]:
    """Describe, for JSON, the content behind names that do not determine it. Only models from a hub are included."""
    pictures = {"data.train": digest_of_pictures(rows.train.rows, beat)}
    found: dict[str, Any] = {"models": {}, "pictures": pictures, "rows": {}}
    if rows.heldout is not None:
        pictures["data.eval"] = digest_of_pictures(rows.heldout.rows, beat)
        found["rows"]["data.eval"] = rows.heldout.identity(beat)
    for key, source in {"model": recipe.model, **models_beside(recipe)}.items():
        if isdir(expanduser(source.path)):
            continue  # env.json has a digest of it
        with suppress(ModelError, EnvironmentProblem):  # loading it reports the problem
            place = resolve(source, f"{key}.path")
            commit = place.name if _COMMIT.fullmatch(place.name) else None
            found["models"][key] = {"files": digest_of(str(place)), "commit": commit, "path": source.path}
    return found


def require_content_of(found: FoundCheckpoint, content: Mapping[str, Any]) -> None:
    """Raise RunError if a model of the hub differs from the one when the checkpoint was written. Reports if pictures of
    the same names, or held-out rows, have changed."""
    before = found.state.get(NAMED, {})
    for key, was in before.get("models", {}).items():
        if was["files"] != content["models"].get(key, was)["files"]:
            pin = f"set {key}.revision: {was['commit']}" if was["commit"] else "restore the earlier files"
            raise RunError(
                f"{key}.path: the files of {was['path']} on the hub have changed since {found.path} was written; "
                f"to continue this run, {pin}; otherwise, name another output"
            )
    new = "from here on, the run uses the new ones"
    for key in _changed(before, content, "pictures"):
        logger.warning(f"{key}: pictures with the same names have changed since {found.path} was written; {new}")
    for key in _changed(before, content, "rows"):
        logger.warning(f"{key}: the held-out rows have changed since {found.path} was written; {new}")


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> list[str]:
    return [key for key, was in before.get(kind, {}).items() if _differ(was, now[kind].get(key, was))]


def _differ(was: Any, now: Any) -> bool:
    """Compare what both versions of tiercel write."""
    if isinstance(was, Mapping):
        return any(was[name] != now[name] for name in was.keys() & now.keys())
    return bool(was != now)

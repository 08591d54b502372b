"""Converting where the images of rows are looked for.

ms-swift starts relative paths in the working directory, then in ROOT_IMAGE_DIR, and opens any absolute path and URL.
tiercel starts them in data.image_root, or else beside the rows, and opens nothing elsewhere; `tiercel check` names what
it would not open.
"""

import os
from collections.abc import Iterator
from os.path import dirname, realpath

from tiercel.convert.draft import RecipeDraft


def set_image_root(draft: RecipeDraft) -> None:
    """Set the directory in which relative paths start there, where it is not that of the rows."""
    if draft.launch.framework != "ms-swift":
        return
    if root := draft.launch.environment.get("ROOT_IMAGE_DIR"):
        draft.set("data.image_root", root, "ROOT_IMAGE_DIR")
        draft.note("the working directory comes first there; here data.image_root alone is searched", "ROOT_IMAGE_DIR")
    elif any(realpath(dirname(path)) != os.getcwd() for path in _files(draft)):
        draft.set("data.image_root", ".", remark="ms-swift starts relative paths of images in the working directory")


def _files(draft: RecipeDraft) -> Iterator[str]:
    """Name the files of rows that the recipe has."""
    more = [entry["path"] for entry in draft.values.get("data.mix", [])]
    for name in (draft.values.get("data.train"), *more, draft.values.get("data.eval")):
        if isinstance(name, str) and not name.startswith("hf:"):
            path, mark, count = name.rpartition("#")
            found = draft.launch.file(path if mark and count.isdigit() else name)
            yield name if found is None else str(found)

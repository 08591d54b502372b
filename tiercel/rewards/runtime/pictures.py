"""Provide the files of a prompt's pictures for the user's rewards that look at them. A picture that is embedded in the
row is written to a read-only file, which exists while a batch is scored."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from tiercel.data.media.images import ImageProblem, resolve
from tiercel.types import EncodedPrompt, ImageSource

READ_ONLY = 0o444


class PictureFiles:
    """Finds the file of each picture. As a context manager it removes the files that it wrote."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> "PictureFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def of(self, prompt: EncodedPrompt) -> tuple[str | None, ...]:
        """Return the file of each picture of a prompt; None for a video, for a picture that an environment added, and
        for a picture that no longer exists."""
        visuals = prompt.row.visuals
        return tuple(self._file(visuals[i], prompt) if i < len(visuals) else None for i in range(len(prompt.images)))

    def _file(self, source: object, prompt: EncodedPrompt) -> str | None:
        if not isinstance(source, ImageSource):
            return None
        if source.data is not None:
            return self._written(source.data)
        try:
            return None if source.path is None else str(resolve(source.path, prompt.row.image_roots))
        except ImageProblem:
            return None

    def _written(self, data: bytes) -> str:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="tiercel-pictures-")
        file = Path(self._folder.name, hashlib.sha256(data).hexdigest())
        if not file.exists():
            file.write_bytes(data)
            file.chmod(READ_ONLY)
        return str(file)

"""Publication of the policy's versions as adapter directories, for engines that hold their own weights.

The name of a directory, `policy-{run}-{N}-{sha8}`, contains the run, the version and a hash of the weights. So an
engine that has loaded the name has the right weights.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tiercel.regular_files import remove
from tiercel.runs.files import file_sha256
from tiercel.writing import GO_ON, let_others_read, writing

WEIGHTS = "adapter_model.safetensors"


class Publisher:
    """Writes and removes versions under `root`. Only the first rank's publisher is used."""

    def __init__(self, run: Path, root: Path):
        self.root = root
        readable = re.sub(r"[^A-Za-z0-9_.]+", "_", run.name)[:40]
        self.run_name = f"{readable}_{hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:6]}"
        self.current: Path | None = None

    def publish(self, version: int, write: Callable[[Path], None]) -> Path:
        """Publish what `write` creates and return its directory, which gets its final name once it is complete."""
        with writing(f"{self.root}: version {version} of the policy", GO_ON):
            self.root.mkdir(parents=True, exist_ok=True)
            unfinished = self.root / f"unfinished-{self.run_name}"
            remove(unfinished)
            unfinished.mkdir()
            write(unfinished)
            let_others_read(unfinished)
            weights = min(unfinished.glob("*.safetensors"))  # of an adapter, or the first file of a whole model
            name = f"policy-{self.run_name}-{version}-{file_sha256(weights)[:8]}"
            directory = self.root / name
            if directory.exists():
                remove(unfinished)
            else:
                unfinished.rename(directory)
        return directory

    def keep_only(self, directories: Iterable[Path]) -> None:
        """Remove the run's versions except these."""
        for other in self._published() - set(directories):
            with suppress(OSError):
                remove(other)

    def close(self) -> None:
        """Remove all versions of the run."""
        for directory in (*self._published(), self.root / f"unfinished-{self.run_name}"):
            with suppress(OSError):
                remove(directory)

    def _published(self) -> set[Path]:
        """Return the run's versions, without copies that somebody made under another name."""
        name = re.compile(rf"policy-{re.escape(self.run_name)}-\d+-[0-9a-f]{{8}}")
        return {path for path in self.root.glob("policy-*") if name.fullmatch(path.name) and not path.is_symlink()}

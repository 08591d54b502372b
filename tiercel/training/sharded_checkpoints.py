"""Save a model that ranks share, as whole weights in several files and moments in shards; no rank gathers all of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.distributed.ranks import Ranks
from tiercel.distributed.sharded import Sharded
from tiercel.distributed.shards import MOMENTS, write_pieces
from tiercel.errors import TiercelError
from tiercel.models.parts import ModelParts
from tiercel.runs.checkpoints import begin_checkpoint, complete_checkpoint
from tiercel.runs.files import file_sha256, sync
from tiercel.training.finite import require_finite_weights
from tiercel.writing import GO_ON, writing

FILE_BYTES = 2 * 2**30  # of weights or moments in a file, and so what a rank holds of them in the host's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedSave:
    """One checkpoint. All ranks call the methods together."""

    root: Path  # of the run's checkpoints
    step: int
    strategy: Sharded

    @property
    def _ranks(self) -> Ranks:
        return self.strategy.ranks

    def save(self, state: dict[str, Any], add: Callable[[Path], None]) -> None:
        """Save what is trained; `add` writes the other files, on the first rank. A valid checkpoint of the same step
        stays as it is. Raises TrainingError where a weight is not finite, and RunError where a disk is full."""
        ranks, needed = self._ranks, self.strategy.checkpoint_bytes()
        ranks.together(lambda: require_finite_weights(self.strategy.shares(), self.step))
        temporary = self._on_first(lambda: self._begin(needed))
        if temporary is None:
            return
        self._write_model(temporary)
        hashes = self._written(lambda: self._write_moments(temporary))
        hashes |= self._written(lambda: self._hash(temporary, self._own_part(sorted((temporary / "model").iterdir()))))

        def complete() -> None:
            add(temporary)
            complete_checkpoint(temporary, self.step, state, hashes)

        self._on_first(complete)

    def _begin(self, needed: int) -> Path | None:
        temporary = begin_checkpoint(self.root, self.step, expected_bytes=needed)
        if temporary is not None:
            (temporary / MOMENTS).mkdir()
        return temporary

    def _write_model(self, temporary: Path) -> None:
        """Gather and write one part after the other. After an error the first rank goes on gathering, as all do."""
        policy, ranks = self.strategy.policy, self._ranks
        error: TiercelError | None = None
        parts: ModelParts | None = None
        for part in self.strategy.model_parts(FILE_BYTES):
            ranks.pulse.beat()
            if ranks.is_first and error is None:
                try:
                    with self._writing():
                        parts = parts or ModelParts(policy.family, policy.model, temporary / "model")
                        parts.add(part)
                except TiercelError as raised:
                    error = raised
            part.clear()  # before the next one is gathered

        def finish() -> None:
            if error is not None:
                raise error
            assert parts is not None
            parts.finish()
            for file in (temporary / "model").iterdir():
                sync(file)
            sync(temporary / "model")

        self._on_first(finish)

    def _write_moments(self, temporary: Path) -> dict[str, str]:
        files = write_pieces(temporary / MOMENTS, self._ranks.rank, self.strategy.moment_pieces(), FILE_BYTES)
        return self._hash(temporary, files)

    def _own_part(self, files: Sequence[Path]) -> Sequence[Path]:
        return files[self._ranks.rank :: self._ranks.world_size]

    def _hash(self, temporary: Path, files: Sequence[Path]) -> dict[str, str]:
        """Flush files to disk, and return their sha256 by name."""
        hashes = {}
        for file in files:
            sync(file)
            hashes[file.relative_to(temporary).as_posix()] = file_sha256(file)
            self._ranks.pulse.beat()
        return hashes

    def _written(self, write: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Let every rank write, and return the hashes of all on the first."""

        def act() -> dict[str, str]:
            with self._writing():
                return write()

        own = self._ranks.together(act)
        return {name: value for each in self._ranks.gather_to_first(own) for name, value in each.items()}

    def _on_first(self, action: Callable[[], Any]) -> Any:
        def act() -> Any:
            with self._writing():
                return action()

        return self._ranks.on_first(act)

    def _writing(self) -> Any:
        return writing(f"{self.root}: the checkpoint of step {self.step}", f"{GO_ON} from the newest checkpoint")

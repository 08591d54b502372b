"""A run's checkpoints: which steps are saved, which one is the best, and which are kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.strategies.shard_files import MOMENTS, MOMENTS_FILE, write_pieces
from tiercel.distributed.strategies.sharded import Sharded
from tiercel.errors import RecipeError, TiercelError
from tiercel.log import logger
from tiercel.models.reference import save_reference
from tiercel.models.weights.saving import save_trained
from tiercel.models.weights.sharded_model import ModelParts
from tiercel.rollout.pending import PendingGroup, load_pending, save_pending
from tiercel.runs.checkpoints import (
    LATE_SCORE,
    SCORE,
    FoundCheckpoint,
    begin_checkpoint,
    best_scored,
    complete_checkpoint,
    is_better,
    prune,
    save_checkpoint,
)
from tiercel.runs.directory import RUN, RunDirectory
from tiercel.runs.files import file_sha256, fsync, write_atomically
from tiercel.training.nonfinite_guard import require_finite_weights
from tiercel.training.trainer import Trainer
from tiercel.writing import GO_ON, writing

FILE_BYTES = 2 * 2**30  # of weights or moments per file, and so the most that a rank holds in host memory


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
        """Save what is trained. `add` writes the other files, on the first rank. A valid checkpoint of the same step
        stays as it is. Raises TrainingError if a weight is not finite, and RunError if a disk is full."""
        ranks, needed = self._ranks, self.strategy.checkpoint_bytes()
        ranks.run_on_all(lambda: require_finite_weights(self.strategy.shares(), self.step))
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
        """Gather and write one part after another. After an error the first rank keeps gathering, because all ranks
        must."""
        policy, ranks = self.strategy.policy, self._ranks
        error: TiercelError | None = None
        parts: ModelParts | None = None
        for part in self.strategy.model_parts(FILE_BYTES):
            ranks.heartbeat.beat()
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
                fsync(file)
            fsync(temporary / "model")

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
            fsync(file)
            hashes[file.relative_to(temporary).as_posix()] = file_sha256(file)
            self._ranks.heartbeat.beat()
        return hashes

    def _written(self, write: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Let every rank write, and return the hashes of all ranks on the first one."""

        def act() -> dict[str, str]:
            with self._writing():
                return write()

        own = self._ranks.run_on_all(act)
        return {name: value for each in self._ranks.gather_on_first(own) for name, value in each.items()}

    def _on_first(self, action: Callable[[], Any]) -> Any:
        def act() -> Any:
            with self._writing():
                return action()

        return self._ranks.run_on_first(act)

    def _writing(self) -> Any:
        return writing(f"{self.root}: the checkpoint of step {self.step}", f"{GO_ON} from the newest checkpoint")


OBJECTIVE = "objective"  # in a checkpoint's state: what the loss needs from earlier steps
LOWEST_IS_BEST = ("eval/loss",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints of a run. All ranks call the methods together; the first one writes."""

    run: RunDirectory
    recipe: BaseRecipe
    state: Mapping[str, Any]  # about the run's inputs, saved in every checkpoint

    def save(
        self,
        trainer: Trainer,
        step: int,
        row: Mapping[str, float],
        pending: Sequence[PendingGroup] = (),
        objective: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Save a checkpoint after `step` updates, and remove all but the newest `train.keep` and the best. `row` holds
        the step's metrics, `pending` this rank's groups of the next step, and `objective` the state of the objective.
        Raises RunError, for example if the disk is full."""
        ranks, strategy = self.run.ranks, trainer.strategy
        ranks.heartbeat.begin("save", step)
        ranks.run_on_first(self.run.require_held)
        ranks.run_on_all(self.run.finish_files)
        groups = [group for each in ranks.gather_on_first(list(pending)) for group in each]
        state = {
            "next_index": step * self.recipe.optim.prompts_per_step,
            "loss_scaler": strategy.scaler_state(),
            **self.state,
            OBJECTIVE: dict(objective),
            **self._score(row),
            **({} if self.run.identity is None else {RUN: self.run.identity}),
        }
        if isinstance(strategy, Sharded) and self.recipe.lora is None:
            ShardedSave(root=self.run.checkpoints, step=step, strategy=strategy).save(
                state, lambda directory: save_pending(directory, groups)
            )
        else:
            self._save_whole(trainer, step, state, groups)
        ranks.run_on_first(lambda: prune(self.run.checkpoints, step, self.recipe.train.keep, self.best(step)))

    def _save_whole(self, trainer: Trainer, step: int, state: dict[str, Any], groups: Sequence[PendingGroup]) -> None:
        """Save with the whole weights and moments on the first rank, which writes them."""
        ranks, strategy = self.run.ranks, trainer.strategy
        weights = strategy.model_weights() if self.recipe.lora is None else strategy.trained_weights()
        ranks.run_on_first(lambda: require_finite_weights(weights, step))
        moments = strategy.optimizer_tensors()

        def write(directory: Path) -> None:
            save_trained(trainer.policy, directory, weights)
            save_reference(trainer.policy, directory)
            save_file(moments, directory / MOMENTS_FILE)
            save_pending(directory, groups)

        def save() -> None:
            folder, needed = self.run.checkpoints, _byte_count(weights) + _byte_count(moments)
            with writing(f"{folder}: the checkpoint of step {step}", f"{GO_ON} from the newest checkpoint"):
                save_checkpoint(folder, step, write, state, expected_bytes=needed)

        ranks.run_on_first(save)

    def best(self, step: int) -> FoundCheckpoint | None:
        """Return the checkpoint up to `step` that train.keep_best keeps, or None if there is none."""
        metric = self.recipe.train.keep_best
        if metric is None:
            return None
        return best_scored(self.run.checkpoints, step, metric, lowest=metric in LOWEST_IS_BEST)

    def is_best(self, step: int, row: Mapping[str, float]) -> bool:
        """Return whether this evaluated step beats every checkpoint by train.keep_best. Raises RecipeError if the first
        evaluation has no such metric; a later one without it is logged, and is not the best."""
        metric = self.recipe.train.keep_best
        if metric is None:
            return False

        def judge() -> bool:
            if metric not in row and step > 0:
                logger.warning(f"step {step}: the evaluation has no {metric}, so train.keep_best cannot take this step")
                return False
            if metric not in row:
                raise RecipeError(
                    [
                        f"train.keep_best: is {metric}, but no reward says which completions are correct; set "
                        "correct_at on one of them, or name another metric"
                    ]
                )
            best = self.best(step - 1)
            return best is None or is_better(row[metric], best.state[SCORE][metric], lowest=metric in LOWEST_IS_BEST)

        return self.run.ranks.run_on_first(judge)  # the first rank has the metrics of all

    def add_score(self, found: FoundCheckpoint, row: Mapping[str, float]) -> None:
        """Keep the score of a checkpoint that was written before its evaluation, if checkpoints have scores."""
        if self.recipe.train.keep_best is None:
            return

        def write() -> None:
            with writing(found.path, GO_ON):
                write_atomically(found.path / LATE_SCORE, json.dumps(self._score(row).get(SCORE)))

        self.run.ranks.run_on_first(write)

    def _score(self, row: Mapping[str, float]) -> dict[str, Any]:
        metric = self.recipe.train.keep_best
        return {SCORE: {metric: row[metric]}} if metric is not None and metric in row else {}


def pending_of(found: FoundCheckpoint | None) -> dict[int, PendingGroup]:
    """Load the groups that a checkpoint kept for the next step, by their prompt's global index."""
    return {} if found is None else load_pending(found.path)


def _byte_count(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes tensors take in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

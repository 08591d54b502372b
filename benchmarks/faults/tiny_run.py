"""A real run directory's checkpoints at the smallest size: an adapter, its moments, two pending groups."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.faults.figure import Size
from tests.tiny_models import TINY_LORA, save_tiny_checkpoint, tiny_recipe
from tiercel.config.schema import BaseRecipe
from tiercel.rollout.pending import PendingGroup
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import file_sha256
from tiercel.training.checkpoints import Checkpoints
from tiercel.training.trainer import Trainer, build_trainer
from tiercel.types import Completion

FAMILY = "qwen2_5_vl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyRun:
    """A run with a checkpoint to save."""

    recipe: BaseRecipe
    trainer: Trainer
    pending: tuple[PendingGroup, ...]

    def save(self, path: Path, step: int, keep: int = 2) -> None:
        """Save a checkpoint in the run directory `path`, and keep the last `keep`."""
        train = self.recipe.train.model_copy(update={"keep": keep})
        recipe = self.recipe.model_copy(update={"train": train})
        checkpoints = Checkpoints(run=RunDirectory(path=path), recipe=recipe, state={})
        checkpoints.save(self.trainer, step, {}, self.pending)


def make_tiny_run(work_dir: Path) -> TinyRun:
    """Build a trainer with moments, as after an update."""
    checkpoint = save_tiny_checkpoint(FAMILY, work_dir / "model")
    recipe = tiny_recipe(checkpoint, lora=TINY_LORA)
    trainer = build_trainer(recipe)
    trainer.strategy.zero_gradients()
    for number, parameter in enumerate(trainer.policy.trained_parameters().values()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    trainer.strategy.update(1.0, 1.0)
    return TinyRun(recipe=recipe, trainer=trainer, pending=tuple(pending_group(index) for index in (7, 9)))


def pending_group(index: int) -> PendingGroup:
    completions = tuple(
        Completion(
            token_ids_L=torch.arange(5) + seed,
            logprobs_L=torch.full((5,), -0.5),
            text="ü",
            is_truncated=False,
            seed=seed,
        )
        for seed in range(2)
    )
    return PendingGroup(index=index, policy_version=1, completions=completions)


def hashes(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): file_sha256(path) for path in files}


def chosen(cases: list, size: Size, every: int) -> list:
    """Return all cases, or every `every`-th for a short run."""
    return cases if size == "full" else cases[::every]

"""The recipe's engine: opened, given each version of the policy, closed."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tiercel.config.schema import GrpoRecipe
from tiercel.models.saving import save_adapter
from tiercel.rollout.local import LocalSampler
from tiercel.rollout.sampler import Sampler
from tiercel.rollout.vllm_process import ProcessSampler
from tiercel.rollout.vllm_server import connect
from tiercel.runs.directory import RunDirectory
from tiercel.runs.publishing import Publisher
from tiercel.training.trainer import Trainer
from tiercel.types import Row

MEMORY = Path("/dev/shm")
VERSIONS_AT_A_TIME = 3  # the old one, the new one, one unfinished
ANY_NUMBER = 999  # of pictures, as vLLM writes it
PROBE = 2**30  # the number of weights that are no version: engines tell adapters apart by it
Build = Callable[[GrpoRecipe, Trainer, Sequence[Row], Callable[[str], None]], Sampler]


class PolicySync:
    """Brings an engine to a version of the policy. All ranks call it together."""

    def __init__(self, sampler: Sampler, trainer: Trainer, run: RunDirectory):
        self.sampler = sampler
        self._trainer = trainer
        in_memory = isinstance(sampler, ProcessSampler) and _is_one_machine() and _has_room(trainer)
        self.publisher = Publisher(run.path, MEMORY if in_memory else run.path / "policies")

    def load(self, version: int) -> None:
        """Give the engine the trained weights as they are now, under this version. An adapter is sent in the dtype that
        the policy computes in: its products round it to that dtype, here as in the engine."""
        if self.sampler.shares_weights:
            self.sampler.load_policy(version, None)
            return
        ranks, publisher, policy = self._trainer.ranks, self.publisher, self._trainer.policy
        weights = self._trainer.strategy.trained_weights()
        write = partial(save_adapter, policy, weights=weights, dtype=policy.compute_dtype)
        directory = ranks.on_first(lambda: publisher.publish(version, write))
        self.sampler.load_policy(version, directory)
        ranks.on_first(lambda: publisher.keep_only(directory))

    def close(self) -> None:
        self.sampler.close()
        if not self.sampler.shares_weights and self._trainer.ranks.is_first:
            self.publisher.close()


@contextmanager
def open_sampler(
    recipe: GrpoRecipe, trainer: Trainer, run: RunDirectory, rows: Sequence[Row], say: Callable[[str], None]
) -> Iterator[PolicySync]:
    """Open the engine that the recipe names; what is yielded keeps it at the policy's version."""
    trainer.ranks.pulse.begin("engine", trainer.ranks.pulse.doing.step)
    sampler = SAMPLERS[recipe.rollout.engine](recipe, trainer, rows, say)
    sync = PolicySync(sampler, trainer, run)
    try:
        yield sync
    finally:
        sync.close()


def _local(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row], say: Callable[[str], None]) -> Sampler:
    strategy = trainer.strategy
    return LocalSampler(
        trainer.policy,
        trainer.vision,
        weights_stay=strategy.passes_are_private,
        prepacked_bytes=recipe.rollout.prepacked_bytes,
        whole_policy=strategy.whole_policy,
        beat=trainer.ranks.pulse.beat,
    )


def _process(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row], say: Callable[[str], None]) -> Sampler:
    return ProcessSampler(trainer.policy.family, recipe, trainer.ranks, images_per_completion(recipe, rows))


def _server(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row], say: Callable[[str], None]) -> Sampler:
    return connect(recipe, trainer.policy.family, trainer.ranks, say)


def images_per_completion(recipe: GrpoRecipe, rows: Sequence[Row]) -> int:
    """Return the largest number of pictures that an engine is told to expect in a sequence, at least 1."""
    if recipe.rollout.has_turns:
        return ANY_NUMBER  # turns bring as many as their tokens leave room for
    return max((len(row.images) for row in rows), default=0) or 1


def _has_room(trainer: Trainer) -> bool:
    """Tell whether the file system in memory has room for the versions that exist at a time; in containers it is
    small."""
    weights = trainer.policy.trained_parameters().values()
    numbers = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
    adapter = trainer.policy.compute_dtype.itemsize * numbers
    return MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > VERSIONS_AT_A_TIME * adapter


def _is_one_machine() -> bool:
    return not dist.is_initialized() or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size()


SAMPLERS: dict[str, Build] = {"local": _local, "vllm": _process, "vllm-server": _server}

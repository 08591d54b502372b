"""The recipe's engine: opened, given each version of the policy, closed.

An adapter is written by runs/publishing.py, and vLLM loads it by rollout/vllm/colocated.py or server.py.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tiercel.config.schema import GrpoRecipe
from tiercel.data.stores import view_of
from tiercel.models.weights.saving import save_adapter, save_model
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import Sampler
from tiercel.rollout.vllm.colocated import ColocatedSampler
from tiercel.rollout.vllm.full_weights import CheckpointForm, read_weights
from tiercel.rollout.vllm.requests import require_served, require_vision_adapters
from tiercel.rollout.vllm.server import connect
from tiercel.runs.directory import RunDirectory
from tiercel.runs.publishing import Publisher
from tiercel.training.trainer import Trainer
from tiercel.types import Row

MEMORY = Path("/dev/shm")
VERSIONS_AT_A_TIME = 3  # the old one, the new one, one unfinished
ANY_NUMBER = 999  # of pictures, as vLLM writes it
PROBE = 2**30  # the number of weights that are not a version; engines tell adapters apart by their number
Build = Callable[[GrpoRecipe, Trainer, Sequence[Row]], Sampler]


class PolicySync:
    """The engine and the link that brings it to a version of the policy. All ranks call it together. `versions` is how
    many are sampled from at a time."""

    def __init__(self, sampler: Sampler, trainer: Trainer, run: RunDirectory, versions: int = 1):
        self.sampler = sampler
        self._trainer = trainer
        self._form: CheckpointForm | None = None  # made at the first load of whole weights
        self._directories = deque[Path](maxlen=versions)  # of the versions that are sampled from
        is_one_machine = trainer.ranks.local_size == trainer.ranks.world_size
        in_memory = isinstance(sampler, ColocatedSampler) and is_one_machine and _has_room(trainer)
        self.publisher = Publisher(run.path, MEMORY if in_memory else run.path / "policies")

    def update_weights(self, version: int) -> None:
        """Give the engine the trained weights as they are now, under this version. An adapter is sent in the dtype that
        the policy computes in, because its products round it to that dtype, here as in the engine."""
        if self.sampler.shares_weights:
            self.sampler.load_policy(version, None)
            return
        policy, strategy = self._trainer.policy, self._trainer.strategy
        if policy.peft is None and self._form is None:
            self._form = self._trainer.ranks.run_on_first(lambda: CheckpointForm.of(policy.family, policy.model))
        if self._form is not None and isinstance(self.sampler, ColocatedSampler) and strategy.passes_are_private:
            self.sampler.load_weights(version, self._form.weights(policy.model))
            return
        ranks, publisher = self._trainer.ranks, self.publisher
        write: Callable[[Path], object]
        if self._form is None:
            write = partial(save_adapter, policy, weights=strategy.trained_weights(), dtype=policy.compute_dtype)
        else:
            weights = {name: each.to(policy.compute_dtype) for name, each in strategy.model_weights().items()}
            write = partial(save_model, policy.family, policy.model, weights=weights)
        directory = ranks.run_on_first(lambda: publisher.publish(version, write))
        if self._form is not None and isinstance(self.sampler, ColocatedSampler):
            self.sampler.load_weights(version, read_weights(directory))
        else:
            self.sampler.load_policy(version, directory)
        self._directories.append(directory)
        ranks.run_on_first(lambda: publisher.keep_only(self._directories))

    def close(self) -> None:
        self.sampler.close()
        if not self.sampler.shares_weights and self._trainer.ranks.is_first:
            self.publisher.close()


@contextmanager
def open_sampler(recipe: GrpoRecipe, trainer: Trainer, run: RunDirectory, rows: Sequence[Row]) -> Iterator[PolicySync]:
    """Open the engine that the recipe names, and yield what keeps it at the policy's version."""
    trainer.ranks.heartbeat.begin("engine", trainer.ranks.heartbeat.activity.step)
    sampler = SAMPLERS[recipe.rollout.engine](recipe, trainer, rows)
    sync = PolicySync(sampler, trainer, run, recipe.rollout.versions)
    try:
        yield sync
    finally:
        sync.close()


def _local(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row]) -> Sampler:
    strategy = trainer.strategy
    return LocalSampler(
        trainer.policy,
        trainer.vision,
        weights_stay=strategy.passes_are_private,
        may_compile=recipe.learner.compile is not False,
        prepacked_bytes=recipe.rollout.prepacked_bytes,
        whole_policy=strategy.whole_policy,
        beat=trainer.ranks.heartbeat.beat,
    )


def _process(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row]) -> Sampler:
    require_served(trainer.policy.family, recipe.rollout.engine)
    adapts_vision = _adapts_vision(recipe, trainer)
    visuals = visuals_per_completion(recipe, rows)
    return ColocatedSampler(trainer.policy.family, recipe, trainer.ranks, visuals, adapts_vision=adapts_vision)


def _server(recipe: GrpoRecipe, trainer: Trainer, rows: Sequence[Row]) -> Sampler:
    require_served(trainer.policy.family, recipe.rollout.engine)
    _adapts_vision(recipe, trainer)
    return connect(recipe, trainer.policy.family, trainer.ranks)


def _adapts_vision(recipe: GrpoRecipe, trainer: Trainer) -> bool:
    """Return whether the adapter has vision layers. Raises EnvironmentProblem if vLLM would not apply them."""
    if recipe.lora is None or trainer.policy.vision_is_frozen:
        return False
    require_vision_adapters(trainer.policy.family, recipe.rollout.engine)
    return True


def visuals_per_completion(recipe: GrpoRecipe, rows: Sequence[Row]) -> dict[str, int]:
    """Return the largest numbers of images, at least 1, and of videos that an engine should expect in a sequence."""
    view = view_of(rows)
    images, videos = (int(view.column(name).max(initial=least)) for name, least in (("images", 1), ("videos", 0)))
    # Turns bring as many images as their tokens leave room for.
    return {"image": ANY_NUMBER if recipe.rollout.has_turns else images, "video": videos}


def _has_room(trainer: Trainer) -> bool:
    """Return whether the in-memory file system has room for the versions that exist at a time; in containers it is
    small."""
    policy = trainer.policy
    sent = policy.model.parameters() if policy.peft is None else policy.trained_parameters().values()
    numbers = sum(getattr(weight, "ds_numel", weight.numel()) for weight in sent)
    version = policy.compute_dtype.itemsize * numbers
    return MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > VERSIONS_AT_A_TIME * version


SAMPLERS: dict[str, Build] = {"local": _local, "vllm": _process, "vllm-server": _server}

"""The recipe's engine: opened, given each version of the policy, closed.

An adapter is written by runs/publishing.py, and vLLM loads it by rollout/vllm/colocated.py or server.py.
"""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.data.stores import view_of
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.tools import BUILT_IN, Toolbox, Toolboxes, load_toolboxes
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.models.chat import require_joining
from tiercel.models.families.base import Family
from tiercel.models.weights.saving import save_adapter, save_model
from tiercel.rewards.external import OfEnvironment
from tiercel.rollout.branching import sample_branches
from tiercel.rollout.dialogue import Dialogue, Limits
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import Sampler, SamplingParams
from tiercel.rollout.vllm.colocated import ColocatedSampler
from tiercel.rollout.vllm.full_weights import CheckpointForm, read_weights
from tiercel.rollout.vllm.requests import require_served, require_vision_adapters
from tiercel.rollout.vllm.server import connect
from tiercel.runs.directory import RunDirectory
from tiercel.runs.publishing import Publisher
from tiercel.training.trainer import Trainer
from tiercel.types import EncodedPrompt, Group, Row

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
        in_memory = isinstance(sampler, ColocatedSampler) and _is_one_machine() and _has_room(trainer)
        self.publisher = Publisher(run.path, MEMORY if in_memory else run.path / "policies")

    def update_weights(self, version: int) -> None:
        """Give the engine the trained weights as they are now, under this version. An adapter is sent in the dtype that
        the policy computes in, because its products round it to that dtype, here as in the engine."""
        if self.sampler.shares_weights:
            self.sampler.load_policy(version, None)
            return
        policy, strategy = self._trainer.policy, self._trainer.strategy
        if policy.peft is None and self._form is None:
            self._form = self._trainer.ranks.on_first(lambda: CheckpointForm.of(policy.family, policy.model))
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
        directory = ranks.on_first(lambda: publisher.publish(version, write))
        if self._form is not None and isinstance(self.sampler, ColocatedSampler):
            self.sampler.load_weights(version, read_weights(directory))
        else:
            self.sampler.load_policy(version, directory)
        self._directories.append(directory)
        ranks.on_first(lambda: publisher.keep_only(self._directories))

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


def _is_one_machine() -> bool:
    return not dist.is_initialized() or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size()


SAMPLERS: dict[str, Build] = {"local": _local, "vllm": _process, "vllm-server": _server}


@dataclass(frozen=True, kw_only=True, slots=True)
class SomeSamples:
    """Source of dialogues for samples whose numbers in their group begin at `first`."""

    dialogues: EnvironmentDialogues
    first: int

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        return self.dialogues.limits_of(prompt)

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        return self.dialogues.open(prompt, [self.first + sample for sample in samples])


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionSampler:
    """An engine that draws completions, with the answers of tools and environment if the recipe has them."""

    sampler: Sampler
    dialogues: EnvironmentDialogues | None

    def begun(self, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
        """Return the prompts with what an environment adds to them at its start."""
        return list(prompts) if self.dialogues is None else self.dialogues.prompts_of(prompts)

    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int], first: int = 0
    ) -> tuple[Group, ...]:
        """Sample completions of prompts that have begun. `seeds` are those of the prompts' samples with the number
        `first`."""
        answers = None if self.dialogues is None else SomeSamples(dialogues=self.dialogues, first=first)
        if params.branches:
            return sample_branches(self.sampler, prompts, params, seeds, answers)
        return self.sampler.sample(prompts, params, seeds, answers)


@contextmanager
def open_dialogues(recipe: Recipe, family: Family) -> Iterator[EnvironmentDialogues | None]:
    """Give the family the recipe's tools before prompts are encoded, and make what answers the policy; None if the
    recipe names nothing. Raises RecipeError if the user's code cannot be used, and ModelError if the chat template
    cannot go on after a turn."""
    if not isinstance(recipe, GrpoRecipe) or not recipe.rollout.has_turns:
        yield None
        return
    rollout = recipe.rollout
    toolboxes = load_toolboxes(rollout, recipe.reliability)
    _require_reward(recipe, toolboxes)
    _require_fork(recipe, toolboxes)
    for name, toolbox in toolboxes.items():
        _require_joining(family.with_tools(toolbox.schemas), toolbox)
        of = "" if name is None else f" of {name}"
        logger.info(f"tools{of}: {', '.join(toolbox.names) or 'none'}; turns join as the chat template writes them")
    limits = Limits(max_turns=rollout.max_turns, max_tokens=rollout.max_trajectory_tokens)
    with EnvironmentDialogues(
        toolboxes, family, data=recipe.data, reliability=recipe.reliability, limits=limits, seed=recipe.train.seed
    ) as dialogues:
        yield dialogues


def _require_joining(family: Family, toolbox: Toolbox) -> None:
    if toolbox.schemas:
        require_joining(family, "tool", has_pictures=not BUILT_IN.keys().isdisjoint(toolbox.names))
    if toolbox.responds:
        require_joining(family, "user")


def _require_fork(recipe: GrpoRecipe, toolboxes: Toolboxes) -> None:
    """Raise RecipeError if the recipe forks trajectories, and an environment cannot be copied."""
    given = list(recipe.rollout.branches)
    names = [each.code.environment for each in toolboxes.values() if each.code.environment and not each.forks]
    if given and names:
        raise RecipeError(
            [
                f"rollout.branches: is {given}, but {name} has no method fork; add one that returns a copy, such as "
                "copy.deepcopy(self), or remove rollout.branches"
                for name in names
            ]
        )


def _require_reward(recipe: GrpoRecipe, toolboxes: Toolboxes) -> None:
    """Raise RecipeError if the recipe asks for a reward that an environment does not give."""
    asked = next((i for i, reward in enumerate(recipe.rewards) if isinstance(reward, OfEnvironment)), None)
    lacking = [each.code.environment for each in toolboxes.values() if not each.gives_reward]
    if asked is not None and lacking:
        problems = [f"rewards.{asked}.name: got environment, but {name} has no get_reward; add it" for name in lacking]
        raise RecipeError(problems)
    for toolbox in toolboxes.values():
        if asked is None and toolbox.gives_reward:
            name = toolbox.code.environment
            logger.warning(
                f"{name} has a get_reward that nothing reads; add {{name: environment}} to rewards to learn from it"
            )

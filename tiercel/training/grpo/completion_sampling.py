"""Completions of prompts by an engine, with the answers of the recipe's tools and environments between turns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.tools import BUILT_IN, Toolbox, Toolboxes, load_toolboxes
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.models.chat import require_joining
from tiercel.models.families.base import Family
from tiercel.rewards.external import OfEnvironment
from tiercel.rollout.branching import sample_branches
from tiercel.rollout.dialogue import Dialogue, Limits
from tiercel.rollout.sampler import Sampler, SamplingParams
from tiercel.types import EncodedPrompt, Group


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
    """Give the family the recipe's tools before prompts are encoded, and open the tools and environments that answer
    the policy; yield None if the recipe has neither. Raises RecipeError if the user's code cannot be used, and
    ModelError if the chat template cannot go on after a turn."""
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

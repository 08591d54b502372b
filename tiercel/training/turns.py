"""Sampling with the tools and the environment that a recipe names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.toolbox import Toolbox, load_toolbox
from tiercel.environments.tools import BUILT_IN
from tiercel.errors import RecipeError
from tiercel.models.family import Family
from tiercel.models.turns import require_joining
from tiercel.rewards.environment import OfEnvironment
from tiercel.rollout.dialogue import Dialogue, Limits
from tiercel.rollout.sampler import Sampler, SamplingParams
from tiercel.types import EncodedPrompt, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class SomeSamples:
    """Makes the dialogues of samples whose numbers in their group begin at `first`."""

    dialogues: EnvironmentDialogues
    first: int

    @property
    def limits(self) -> Limits:
        return self.dialogues.limits

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        return self.dialogues.open(prompt, [self.first + sample for sample in samples])


@dataclass(frozen=True, kw_only=True, slots=True)
class Completer:
    """Draws completions from an engine, with the answers of tools and environment where the recipe has them."""

    sampler: Sampler
    dialogues: EnvironmentDialogues | None

    def begun(self, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
        """Return the prompts with what an environment adds to them at its start."""
        return list(prompts) if self.dialogues is None else self.dialogues.prompts_of(prompts)

    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int], first: int = 0
    ) -> tuple[Group, ...]:
        """Sample completions of prompts that have begun. `seeds`: of their samples with the number `first`."""
        answers = None if self.dialogues is None else SomeSamples(dialogues=self.dialogues, first=first)
        return self.sampler.sample(prompts, params, seeds, answers)


@contextmanager
def open_dialogues(recipe: Recipe, family: Family, say: Callable[[str], None]) -> Iterator[EnvironmentDialogues | None]:
    """Give the family the recipe's tools, before prompts are encoded, and make what answers the policy; None where the
    recipe names nothing. Raises RecipeError where the user's code cannot be used, ModelError where the chat template
    cannot go on after a turn."""
    if not isinstance(recipe, GrpoRecipe) or not recipe.rollout.has_turns:
        yield None
        return
    rollout = recipe.rollout
    toolbox = load_toolbox(rollout.environment, rollout.tools, recipe.reliability)
    _require_reward(recipe, toolbox, say)
    family.tools = toolbox.schemas
    if toolbox.schemas:
        require_joining(family, "tool", has_pictures=not BUILT_IN.keys().isdisjoint(toolbox.names))
    if toolbox.responds:
        require_joining(family, "user")
    limits = Limits(max_turns=rollout.max_turns, max_tokens=rollout.max_trajectory_tokens)
    say(f"tools: {', '.join(toolbox.names) or 'none'}; turns join as the chat template writes them")
    with EnvironmentDialogues(
        toolbox, family, data=recipe.data, reliability=recipe.reliability, limits=limits, seed=recipe.train.seed
    ) as dialogues:
        yield dialogues


def _require_reward(recipe: GrpoRecipe, toolbox: Toolbox, say: Callable[[str], None]) -> None:
    """Raise RecipeError where the recipe asks for a reward that the environment does not give."""
    asked = next((i for i, reward in enumerate(recipe.rewards) if isinstance(reward, OfEnvironment)), None)
    name = recipe.rollout.environment
    if asked is not None and not toolbox.gives_reward:
        raise RecipeError([f"rewards.{asked}.name: environment given, but {name} has no get_reward; add it"])
    if asked is None and toolbox.gives_reward:
        say(f"{name} has a get_reward that nothing reads; add {{name: environment}} to rewards to learn from it")

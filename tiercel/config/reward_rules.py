"""Judgements on the recipe's rewards."""

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.rewards.builtin import TELLS_RIGHT as TELLS_RIGHT
from tiercel.rewards.entry import Entry
from tiercel.rewards.started import ByModel, RewardModel
from tiercel.sections import Keys, Problems, Section, shown


def reward_entries(recipe: GrpoRecipe) -> Problems:
    for index, reward in enumerate(recipe.rewards):
        for problem in reward.problems(recipe.rewards[:index]):
            yield problem.below(f"rewards.{index}")
    if recipe.learns_from_rewards and recipe.rewards and all(reward.weight == 0 for reward in recipe.rewards):
        keys = tuple(f"rewards.{index}.weight" for index in range(len(recipe.rewards)))
        yield Keys(keys[0], *keys[1:]).problem(
            "0 given, as for every reward; all advantages would be 0; give one a weight"
        )


def reward_names(recipe: GrpoRecipe) -> Problems:
    """Refuse an entry that comes twice; sections, such as the rows or the judge, tell two of a name apart."""
    first: dict[str, str] = {}
    for index, reward in enumerate(recipe.rewards):
        own = "name" if reward.name else "call"
        given = getattr(reward, own, None)
        if given is None:
            continue
        key = f"rewards.{index}.{own}"
        entry = repr((given, [(option, value) for option, value in reward if isinstance(value, Section)]))
        if entry in first:
            yield Keys(key, first[entry]).problem(
                f"{shown(given)} given, as at {first[entry]}; keep one entry, with the sum of the weights"
            )
        first.setdefault(entry, key)


def tells_right(reward: Entry) -> bool:
    """Say whether the reward tells right completions from wrong ones."""
    return reward.right_from is not None


def reward_models(recipe: BaseRecipe) -> tuple[RewardModel, ...]:
    """List the checkpoints that score."""
    rewards = recipe.rewards if isinstance(recipe, GrpoRecipe) else ()
    return tuple(reward.model for reward in rewards if isinstance(reward, ByModel))

"""Check the recipe's rewards, tools and environments."""

from tiercel.algorithms import advantage_of
from tiercel.config.conflicts.table import conflict
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config_base import Keys, Problems, shown
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.external import ByModel, OfEnvironment, RewardModel
from tiercel.rewards.registry import TELLS_RIGHT as TELLS_RIGHT
from tiercel.user_functions import CALL_FORM, OPENENV, OPENENV_FORM, is_openenv


def reward_entries(recipe: GrpoRecipe) -> Problems:
    for index, reward in enumerate(recipe.rewards):
        for problem in reward.problems(recipe.rewards[:index]):
            yield problem.below(f"rewards.{index}")
    if recipe.learns_from_rewards and recipe.rewards and all(reward.weight == 0 for reward in recipe.rewards):
        keys = tuple(f"rewards.{index}.weight" for index in range(len(recipe.rewards)))
        yield Keys(keys[0], *keys[1:]).problem(
            "is 0, as for every other reward, so all advantages would be 0; set a weight for at least one reward"
        )


def reward_names(recipe: GrpoRecipe) -> Problems:
    """Refuse an entry that is given twice. Two entries with the same name are different if any of their options
    differs."""
    first: dict[str, str] = {}
    for index, reward in enumerate(recipe.rewards):
        own = "name" if reward.name else "call"
        given = getattr(reward, own, None)
        if given is None:
            continue
        key = f"rewards.{index}.{own}"
        entry = repr((given, [(option, value) for option, value in reward if option != "weight"]))
        if entry in first:
            yield conflict("reward twice", key, first[entry], shown(given))
        first.setdefault(entry, key)


def tells_right(reward: RewardEntry) -> bool:
    """Return whether the reward tells right completions from wrong ones."""
    return reward.right_from is not None


def unlearnt_rewards(recipe: GrpoRecipe) -> list[str]:
    """Return what a person should know about rewards that have a weight but do not teach: an advantage that asks only
    whether a completion is right takes the first reward that says so."""
    algorithm = recipe.algorithm
    if not isinstance(algorithm.advantage, str) or advantage_of(algorithm.advantage).depends_on != "right":
        return []
    unread, is_decided = [], False
    for each in recipe.rewards:
        if is_decided or not tells_right(each):
            unread += [each.title] if each.weight else []
        is_decided = is_decided or (tells_right(each) and each.where is None)  # for all rows
    return [
        f"algorithm.advantage {algorithm.advantage} uses only whether a completion is right, by another reward; reward "
        f"{title} is logged, but the policy does not learn from it"
        for title in unread
    ]


def reward_models(recipe: BaseRecipe) -> tuple[RewardModel, ...]:
    """List the reward models of the recipe."""
    rewards = recipe.rewards if isinstance(recipe, GrpoRecipe) else ()
    return tuple(reward.model for reward in rewards if isinstance(reward, ByModel))


BUILTIN_TOOLS = ("zoom", "crop", "mark")


def turns(recipe: GrpoRecipe) -> Problems:
    """Refuse keys of turns if neither tools nor an environment answer, and what cannot be combined with turns."""
    rollout = recipe.rollout
    for index, tool in enumerate(rollout.tools):
        if ":" not in tool and tool not in BUILTIN_TOOLS:
            yield conflict("no built-in tool", index, shown(tool), ", ".join(BUILTIN_TOOLS), CALL_FORM)
    if not rollout.environments:
        yield conflict("environment")
    for name, environment in rollout.environments.items():
        key = "rollout.environment" if name is None else f"rollout.environment.{name}"
        if environment is not None and environment.startswith((OPENENV, "http:", "https:")):
            if not is_openenv(environment):
                yield conflict("OpenEnv server", key, shown(environment), OPENENV_FORM)
        elif environment is not None and ":" not in environment:
            yield conflict("no class of yours", key, shown(environment), CALL_FORM)
    for index, reward in enumerate(recipe.rewards):
        if isinstance(reward, OfEnvironment) and rollout.environment is None:
            yield conflict("environment reward alone", index)
    if not rollout.has_turns:
        for key in rollout.changed("max_turns", "max_trajectory_tokens"):
            yield conflict("key of turns alone", key)
        return
    if rollout.lookahead:
        yield conflict("lookahead and tools")
    if rollout.max_new_tokens > rollout.max_trajectory_tokens:
        yield conflict("max_new_tokens", rollout.max_new_tokens, rollout.max_trajectory_tokens)

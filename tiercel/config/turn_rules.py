"""Judgements on tools and environments, which answer the policy between its turns."""

from tiercel.calls import CALL_FORM
from tiercel.config.schema import GrpoRecipe
from tiercel.rewards.environment import OfEnvironment
from tiercel.sections import Keys, Problems, shown

BUILTIN_TOOLS = ("zoom", "crop", "mark")
OF_TURNS = ("max_turns", "max_trajectory_tokens")


def turns(recipe: GrpoRecipe) -> Problems:
    """Refuse keys of turns where nothing answers, and what turns cannot have."""
    rollout = recipe.rollout
    for index, tool in enumerate(rollout.tools):
        if ":" not in tool and tool not in BUILTIN_TOOLS:
            yield Keys(f"rollout.tools.{index}").problem(
                f"{shown(tool)} given; built in are {', '.join(BUILTIN_TOOLS)}; write your own as {CALL_FORM}"
            )
    if rollout.environment is not None and ":" not in rollout.environment:
        yield Keys("rollout.environment").problem(
            f"{shown(rollout.environment)} given; write a class of yours as {CALL_FORM}"
        )
    for index, reward in enumerate(recipe.rewards):
        if isinstance(reward, OfEnvironment) and rollout.environment is None:
            yield Keys(f"rewards.{index}.name", "rollout.environment").problem(
                "environment given without rollout.environment; name the class whose get_reward answers"
            )
    if rollout.has_turns:
        yield from _with_turns(recipe)
        return
    for key in OF_TURNS:
        if getattr(rollout, key) != type(rollout).model_fields[key].default:
            yield Keys(f"rollout.{key}", "rollout.tools", "rollout.environment").problem(
                "given without rollout.tools or rollout.environment, so a completion has one turn; remove it, or "
                "name what answers"
            )


def _with_turns(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    if rollout.lookahead:
        yield Keys("rollout.lookahead", "rollout.tools", "rollout.environment").problem(
            "1 given with tools or an environment, whose answers are not awaited while the learner works; write 0"
        )
    if rollout.max_new_tokens > rollout.max_trajectory_tokens:
        yield Keys("rollout.max_new_tokens", "rollout.max_trajectory_tokens").problem(
            f"{rollout.max_new_tokens} given, above rollout.max_trajectory_tokens "
            f"({rollout.max_trajectory_tokens}); a turn is a part of a completion"
        )

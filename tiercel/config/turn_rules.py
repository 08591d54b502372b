"""Judgements on tools and environments, which answer the policy between its turns."""

from tiercel.calls import CALL_FORM
from tiercel.config.schema import GrpoRecipe
from tiercel.rewards.environment import OfEnvironment
from tiercel.sections import Problem, Problems, shown

BUILTIN_TOOLS = ("zoom", "crop", "mark")
OF_TURNS = ("max_turns", "max_trajectory_tokens")


def turns(recipe: GrpoRecipe) -> Problems:
    """Refuse keys of turns where nothing answers, and what turns cannot have."""
    rollout = recipe.rollout
    for index, tool in enumerate(rollout.tools):
        if ":" not in tool and tool not in BUILTIN_TOOLS:
            yield Problem(
                key=f"rollout.tools.{index}",
                text=f"{shown(tool)} given; built in are {', '.join(BUILTIN_TOOLS)}; write your own as {CALL_FORM}",
            )
    if rollout.environment is not None and ":" not in rollout.environment:
        yield Problem(
            key="rollout.environment", text=f"{shown(rollout.environment)} given; write a class of yours as {CALL_FORM}"
        )
    for index, reward in enumerate(recipe.rewards):
        if isinstance(reward, OfEnvironment) and rollout.environment is None:
            yield Problem(
                key=f"rewards.{index}.name",
                text="environment given without rollout.environment; name the class whose get_reward answers",
                also=("rollout.environment",),
            )
    if rollout.has_turns:
        yield from _with_turns(recipe)
        return
    for key in OF_TURNS:
        if getattr(rollout, key) != type(rollout).model_fields[key].default:
            yield Problem(
                key=f"rollout.{key}",
                text="given without rollout.tools or rollout.environment, so a completion has one turn; remove it, or "
                "name what answers",
                also=("rollout.tools", "rollout.environment"),
            )


def _with_turns(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    if rollout.lookahead:
        yield Problem(
            key="rollout.lookahead",
            text="1 given with tools or an environment, whose answers are not awaited while the learner works; write 0",
            also=("rollout.tools", "rollout.environment"),
        )
    if rollout.max_new_tokens > rollout.max_trajectory_tokens:
        yield Problem(
            key="rollout.max_new_tokens",
            text=f"{rollout.max_new_tokens} given, above rollout.max_trajectory_tokens "
            f"({rollout.max_trajectory_tokens}); a turn is a part of a completion",
            also=("rollout.max_trajectory_tokens",),
        )

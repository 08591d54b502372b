"""Check groups that fork."""

from math import prod

from tiercel.config.schema import GrpoRecipe
from tiercel.config_base import Keys, Problems, shown


def branches(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    given, size, at = shown(list(rollout.branches)), prod(rollout.branches), rollout.branch_at
    if not rollout.branches:
        if at is not None:
            yield Keys("rollout.branch_at", "rollout.branches").problem(
                f"is {shown(at)}, but rollout.branches is not set; set it, for example to [2, 4], or remove this key"
            )
        return
    if len(rollout.branches) == 1:
        yield Keys("rollout.branches").problem(
            f"is {given}, which has no fork; use first parts and continuations of each, such as [2, 4], or remove "
            "this key"
        )
    if size != rollout.group_size:
        yield Keys("rollout.branches", "rollout.group_size").problem(
            f"is {given}, whose product is {size}, but rollout.group_size is {rollout.group_size}; set "
            f"rollout.group_size: {size}, or use numbers whose product is {rollout.group_size}"
        )
    if rollout.has_turns:
        if at is not None:
            yield Keys("rollout.branch_at", "rollout.tools", "rollout.environment").problem(
                f"is {shown(at)}, but with tools or an environment, completions fork after a turn; remove this key"
            )
        if len(rollout.branches) > rollout.max_turns:
            yield Keys("rollout.branches", "rollout.max_turns").problem(
                f"is {given}, which forks after {len(rollout.branches) - 1} turns, but rollout.max_turns is "
                f"{rollout.max_turns}; set rollout.max_turns: {len(rollout.branches)} or more"
            )
    elif not at:
        yield Keys("rollout.branch_at", "rollout.branches").problem(
            f'is not set, but rollout.branches is {given}; set the string that ends a first part, such as "</think>"'
        )
    elif at in rollout.stop:
        yield Keys("rollout.branch_at", "rollout.stop").problem(
            f"is {shown(at)}, but rollout.stop ends a completion there; remove it from rollout.stop"
        )
    if rollout.lookahead:
        yield Keys("rollout.branches", "rollout.lookahead").problem(
            f"is {given}, but rollout.lookahead is {rollout.lookahead}, and parts are not sampled one after another "
            "while the learner works; set rollout.lookahead: 0"
        )

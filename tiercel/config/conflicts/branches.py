"""Check groups that fork."""

from math import prod

from tiercel.config.schema import GrpoRecipe
from tiercel.sections import Keys, Problems, shown


def branches(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    given, size, at = shown(list(rollout.branches)), prod(rollout.branches), rollout.branch_at
    if not rollout.branches:
        if at is not None:
            yield Keys("rollout.branch_at", "rollout.branches").problem(
                f"{shown(at)} given without rollout.branches; write branches, such as [2, 4], or remove it"
            )
        return
    if len(rollout.branches) == 1:
        yield Keys("rollout.branches").problem(
            f"{given} given, which has no fork; write first parts and continuations of each, such as [2, 4], or "
            "remove it"
        )
    if size != rollout.group_size:
        yield Keys("rollout.branches", "rollout.group_size").problem(
            f"{given} given, whose product is {size}, with rollout.group_size {rollout.group_size}; write "
            f"rollout.group_size: {size}, or branches with the product {rollout.group_size}"
        )
    if rollout.has_turns:
        if at is not None:
            yield Keys("rollout.branch_at", "rollout.tools", "rollout.environment").problem(
                f"{shown(at)} given with tools or an environment, where completions fork after a turn; remove it"
            )
        if len(rollout.branches) > rollout.max_turns:
            yield Keys("rollout.branches", "rollout.max_turns").problem(
                f"{given} given, which forks after {len(rollout.branches) - 1} turns, with rollout.max_turns "
                f"{rollout.max_turns}; write rollout.max_turns: {len(rollout.branches)} or more"
            )
    elif not at:
        yield Keys("rollout.branch_at", "rollout.branches").problem(
            f'missing, with rollout.branches {given}; write the string that ends a first part, such as "</think>"'
        )
    elif at in rollout.stop:
        yield Keys("rollout.branch_at", "rollout.stop").problem(
            f"{shown(at)} given, at which rollout.stop ends a completion; take it out of rollout.stop"
        )
    if rollout.lookahead:
        yield Keys("rollout.branches", "rollout.lookahead").problem(
            f"{given} given with rollout.lookahead {rollout.lookahead}, but parts are not sampled one after another "
            "while the learner works; write rollout.lookahead: 0"
        )

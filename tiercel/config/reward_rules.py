"""Judgements on the recipe's rewards."""

import re

from tiercel.config.keys import shown
from tiercel.config.problems import Problem, Problems
from tiercel.config.schema import GrpoRecipe, Reward

REWARD_OPTIONS: dict[str, tuple[str, ...]] = {
    "format": ("pattern", "correct_at"),
    "exact": ("answer_column", "correct_at"),
    "number": ("tolerance", "answer_column", "correct_at"),
    "choice": ("choices", "answer_column", "correct_at"),
    "iou": ("answer_column", "correct_at"),
    "length": ("max_tokens", "correct_at"),
    "call": ("env", "correct_at"),
}
_FILE_CALL = re.compile(r"(?P<file>.+\.py):[A-Za-z_]\w*")
_MODULE_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def reward_entries(recipe: GrpoRecipe) -> Problems:
    for index, reward in enumerate(recipe.rewards):
        key = f"rewards.{index}"
        if reward.name is None and reward.call is None:
            yield Problem(key=key, text="has neither name nor call; write one of them")
        elif reward.name is not None and reward.call is not None:
            yield Problem(
                key=key,
                text=f"has both name ({reward.name}) and call ({reward.call}); write an entry for each",
            )
        else:
            yield from _reward_options(key, reward)
    if recipe.rewards and all(reward.weight == 0 for reward in recipe.rewards):
        keys = tuple(f"rewards.{index}.weight" for index in range(len(recipe.rewards)))
        yield Problem(
            key=keys[0],
            text="0 given, as for every reward; all advantages would be 0; give one a weight",
            also=keys[1:],
        )


def _reward_options(key: str, reward: Reward) -> Problems:
    """Problems of one entry that has either a name or a call."""
    kind = reward.name or "call"
    named = f"the reward {kind}" if reward.name else "a reward by call"
    options = sorted({option for every in REWARD_OPTIONS.values() for option in every})
    for option in options:
        value = getattr(reward, option)
        if value is not None and option not in REWARD_OPTIONS[kind]:
            takers = ", ".join(name for name, its in REWARD_OPTIONS.items() if option in its)
            yield Problem(
                key=f"{key}.{option}",
                text=f"{shown(value)} given, but {named} does not take it; remove it (it belongs to {takers})",
                also=(f"{key}.name", f"{key}.call"),
            )
    if not all(_VARIABLE.fullmatch(name) for name in reward.env or ()):
        yield Problem(  # it does not repeat what was given, which may be a secret
            key=f"{key}.env",
            text="must be names of environment variables alone, such as [OPENAI_API_KEY]; their values stay out of "
            "the recipe",
        )
    if reward.pattern is not None and (fault := regex_fault(reward.pattern)) is not None:
        yield Problem(key=f"{key}.pattern", text=f"{shown(reward.pattern)} is no regular expression: {fault}")
    if reward.choices is not None and len(set(reward.choices)) < max(2, len(reward.choices)):
        yield Problem(
            key=f"{key}.choices", text=f"{shown(reward.choices)} given; must be two or more, each of them once"
        )
    if reward.name == "length" and reward.max_tokens is None:
        yield Problem(
            key=f"{key}.max_tokens",
            text="missing; the reward length needs the number of tokens up to which a completion gets all of it",
            also=(f"{key}.name",),
        )
    if reward.call is not None and call_file(reward.call) is None and not _MODULE_CALL.fullmatch(reward.call):
        yield Problem(
            key=f"{key}.call",
            text=f"{shown(reward.call)} given; must be file.py:function or package.module:function",
        )


def reward_names(recipe: GrpoRecipe) -> Problems:
    first: dict[str, str] = {}
    for index, reward in enumerate(recipe.rewards):
        given = reward.name or reward.call
        if given is None:
            continue
        key = f"rewards.{index}.{'name' if reward.name else 'call'}"
        if given in first:
            yield Problem(
                key=key,
                text=f"{shown(given)} given, as at {first[given]}; keep one entry, with the sum of the weights",
                also=(first[given],),
            )
        first.setdefault(given, key)


def call_file(call: str) -> str | None:
    """The file of `file.py:function`; None for `package.module:function` and for what is neither."""
    match = _FILE_CALL.fullmatch(call)
    return match["file"] if match else None


def regex_fault(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None

"""Judgements on the recipe's rewards."""

import re

from tiercel.calls import CALL_FORM, is_call
from tiercel.config.addresses import address_fault
from tiercel.config.keys import shown
from tiercel.config.problems import Problem, Problems
from tiercel.config.schema import GrpoRecipe, Judge, Reward, RewardModel, Section

OF_A_TRUTH = ("answer_column", "correct_at")
REWARD_OPTIONS: dict[str, tuple[str, ...]] = {
    "format": ("pattern", "correct_at"),
    "exact": OF_A_TRUTH,
    "normalised": OF_A_TRUTH,
    "ocr": OF_A_TRUTH,
    "number": ("tolerance", "relative_tolerance", *OF_A_TRUTH),
    "count": OF_A_TRUTH,
    "math": OF_A_TRUTH,
    "choice": ("choices", *OF_A_TRUTH),
    "json": ("json_schema", "correct_at"),
    "iou": ("threshold", *OF_A_TRUTH),
    "giou": ("threshold", *OF_A_TRUTH),
    "ciou": ("threshold", *OF_A_TRUTH),
    "box_precision": ("threshold", *OF_A_TRUTH),
    "box_recall": ("threshold", *OF_A_TRUTH),
    "box_f1": ("threshold", *OF_A_TRUTH),
    "box_map": OF_A_TRUTH,
    "point_in_box": OF_A_TRUTH,
    "vlm_r1_rec": OF_A_TRUTH,
    "length": ("max_tokens", "correct_at"),
    "cosine": ("max_tokens",),
    "soft_overlong": ("max_tokens", "buffer", "correct_at"),
    "repetition": ("ngram", "correct_at"),
    "judge": ("judge", *OF_A_TRUTH),
    "model": ("model", "correct_at"),
    "call": ("env", "correct_at"),
}
NEEDED_OPTIONS = {
    ("judge", "judge"): "the section that says whom to ask, such as {url: http://127.0.0.1:8000/v1, model: NAME}",
    ("model", "model"): "the section that says which reward model, such as {path: organisation/name}",
    ("length", "max_tokens"): "the number of tokens up to which a completion gets all of it",
    ("cosine", "max_tokens"): "the number of tokens at which its curve ends, such as rollout.max_new_tokens",
    ("soft_overlong", "max_tokens"): "the number of tokens from which on it is -1, such as rollout.max_new_tokens",
    ("soft_overlong", "buffer"): "the number of tokens before max_tokens from which on it falls",
}
TELLS_RIGHT = (
    "exact",
    "normalised",
    "ocr",
    "number",
    "count",
    "math",
    "choice",
    "iou",
    "box_f1",
    "point_in_box",
    "vlm_r1_rec",
)  # built-in rewards with a correct_at of their own
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
            given = "" if isinstance(value, Section) else f"{shown(value)} "
            yield Problem(
                key=f"{key}.{option}",
                text=f"{given}given, but {named} does not take it; remove it (it belongs to {takers})",
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
    for (name, option), meaning in NEEDED_OPTIONS.items():
        if reward.name == name and getattr(reward, option) is None:
            yield Problem(
                key=f"{key}.{option}",
                text=f"missing; the reward {name} needs {meaning}",
                also=(f"{key}.name",),
            )
    if reward.judge is not None:
        yield from _judge(key, reward.judge)
    if reward.model is not None:
        yield from _reward_model(key, reward.model)
    if reward.buffer is not None and reward.max_tokens is not None and reward.buffer > reward.max_tokens:
        yield Problem(
            key=f"{key}.buffer",
            text=f"{reward.buffer} given, above max_tokens ({reward.max_tokens}); even an empty completion would lose",
            also=(f"{key}.max_tokens",),
        )
    if reward.call is not None and not is_call(reward.call):
        yield Problem(
            key=f"{key}.call",
            text=f"{shown(reward.call)} given; must be {CALL_FORM}",
        )


def _judge(key: str, judge: Judge) -> Problems:
    if (fault := address_fault(judge.url)) is not None:
        yield Problem(key=f"{key}.judge.url", text=f"{fault}; write it like http://127.0.0.1:8000/v1")
    if judge.key is not None and not _VARIABLE.fullmatch(judge.key):
        yield Problem(  # it does not repeat what was given, which may be the key itself
            key=f"{key}.judge.key",
            text="must be the name of an environment variable, such as OPENAI_API_KEY; the key itself stays out of the "
            "recipe",
        )


def _reward_model(key: str, model: RewardModel) -> Problems:
    if model.max_tokens > model.batch_tokens:
        yield Problem(
            key=f"{key}.model.batch_tokens",
            text=f"{model.batch_tokens} given; must hold the longest conversation: model.max_tokens is "
            f"{model.max_tokens}",
            also=(f"{key}.model.max_tokens",),
        )


def cosine_knows_right(recipe: GrpoRecipe) -> Problems:
    for index, reward in enumerate(recipe.rewards):
        before = recipe.rewards[:index]
        if reward.name == "cosine" and not any(tells_right(each) for each in before):
            yield Problem(
                key=f"rewards.{index}.name",
                text="cosine given, but no reward before it tells right from wrong; put one before it, such as exact, "
                "or give one a correct_at",
            )


def takes_time(reward: Reward) -> bool:
    """Whether scoring a batch may take up to reliability.reward_timeout seconds."""
    return reward.call is not None or reward.name in ("math", "judge")


def tells_right(reward: Reward) -> bool:
    """Whether the reward says of a completion that it is right or wrong."""
    return reward.correct_at is not None or reward.name in TELLS_RIGHT


def reward_names(recipe: GrpoRecipe) -> Problems:
    first: dict[tuple[str, str], str] = {}
    for index, reward in enumerate(recipe.rewards):
        given = reward.name or reward.call
        if given is None:
            continue
        key = f"rewards.{index}.{'name' if reward.name else 'call'}"
        entry = (given, repr((reward.where, reward.judge, reward.model)))
        if entry in first:
            yield Problem(
                key=key,
                text=f"{shown(given)} given, as at {first[entry]}; keep one entry, with the sum of the weights",
                also=(first[entry],),
            )
        first.setdefault(entry, key)


def regex_fault(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None

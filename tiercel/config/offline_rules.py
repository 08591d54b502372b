"""Judgements of recipes that learn from answers in their rows."""

from collections.abc import Callable

from tiercel.algorithms.pair_section import PAIR_LOSS_NAMES, SMOOTHED, WITHOUT_REFERENCE
from tiercel.config.keys import named
from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.schema import BaseRecipe, DpoRecipe, OfflineRecipe
from tiercel.sections import Keys, Problems


def _rows_fit_microbatch(recipe: OfflineRecipe) -> Problems:
    prompt, budget = recipe.data.max_prompt_tokens, recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and recipe.smallest_microbatch(prompt) > budget:
        what = "the longest row" if recipe.purpose == "sft" else "two answers, twice the longest row"
        yield Keys("learner.max_tokens_per_microbatch", "data.max_prompt_tokens").problem(
            f"{budget} given; must hold {what}: data.max_prompt_tokens is {prompt}"
        )


def _one_update(recipe: OfflineRecipe) -> Problems:
    for key, value in (("minibatches", recipe.optim.minibatches), ("rollout_epochs", recipe.optim.rollout_epochs)):
        if value > 1:
            yield Keys(f"optim.{key}").problem(
                f"{value} given; a step of {named(recipe.kind)} recipe is one update, because there is no rollout "
                "to split; remove it, and lower optim.prompts_per_step for smaller updates"
            )


def _last_turn(recipe: OfflineRecipe) -> Problems:
    if recipe.purpose != "sft" and recipe.data.train_turns != "all":
        yield Keys("data.train_turns").problem(
            f"{recipe.data.train_turns} given, but `tiercel {recipe.kind}` learns only the last answer; remove it"
        )


def dropout(recipe: BaseRecipe) -> Problems:
    """Judge dropout where continuations share a prompt."""
    form = recipe.learner.form
    if recipe.lora is not None and recipe.lora.dropout > 0 and form != "repeated":
        yield Keys("lora.dropout", "learner.form").problem(
            f"{recipe.lora.dropout:g} given with learner.form {form}; answers share one prompt computation, "
            "and dropout would give each its own; write lora.dropout: 0, or learner.form: repeated"
        )


def _grouped_rows(recipe: OfflineRecipe) -> Problems:
    if recipe.data.group_by_prefix and recipe.purpose == "labels":
        yield Keys("data.group_by_prefix").problem(
            f"true given, but `tiercel {recipe.kind}` learns each row's answer by itself and groups nothing; remove it"
        )
    elif recipe.data.group_by_prefix and recipe.data.mix:
        yield Keys("data.group_by_prefix", "data.mix").problem(
            "true given with data.mix, which takes rows of the files by turns; write one file, or remove one of the two"
        )


def _shared_dropout(recipe: OfflineRecipe) -> Problems:
    if recipe.purpose != "sft" or recipe.data.group_by_prefix:
        yield from dropout(recipe)


def _pair_loss(recipe: OfflineRecipe) -> Problems:
    if not isinstance(recipe, DpoRecipe):
        return
    dpo = recipe.dpo
    others = tuple(name for name in PAIR_LOSS_NAMES if name != "orpo")
    with_reference = tuple(name for name in PAIR_LOSS_NAMES if name not in WITHOUT_REFERENCE)
    for key, is_given, takers in (
        ("gamma", dpo.gamma is not None, ("simpo",)),
        ("label_smoothing", dpo.label_smoothing > 0, SMOOTHED),
        ("length_normalised", dpo.length_normalised, others),
        ("precompute_reference", dpo.precompute_reference, with_reference),
    ):
        if is_given and dpo.loss not in takers:
            yield Keys(f"dpo.{key}", "dpo.loss").problem(
                f"{getattr(dpo, key)} given, but the loss {dpo.loss} has no place for it; remove it (it belongs "
                f"to {', '.join(takers)})"
            )


def _kept_start(recipe: OfflineRecipe) -> Problems:
    if keeps_start(recipe) and recipe.train.strategy == "deepspeed":
        yield Keys("train.strategy", "lora", "freeze").problem(
            f"deepspeed given, whose ranks hold parts of weights, with {', '.join(whole_parts(recipe))} trained "
            "whole, of which the reference is a copy; write fsdp2, or for DPO dpo.precompute_reference: true"
        )


OFFLINE_RULES: tuple[Callable[[OfflineRecipe], Problems], ...] = (
    _rows_fit_microbatch,
    _one_update,
    _last_turn,
    _grouped_rows,
    _shared_dropout,
    _pair_loss,
    _kept_start,
)

"""Check recipes that learn from the answers in their rows or from a teacher."""

from collections.abc import Callable, Collection
from operator import attrgetter
from string import Formatter

from tiercel.algorithms.preference_sections import (
    MATCHED,
    OF_DIVERGENCES,
    OF_MEANS,
    PAIR_LOSS_NAMES,
    SMOOTHED,
    WITHOUT_REFERENCE,
)
from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.teacher import Teacher
from tiercel.config.conflicts.table import conflict
from tiercel.config.keys import named
from tiercel.config.schema import BaseRecipe, DistillRecipe, DpoRecipe, GrpoRecipe, OfflineRecipe, SftRecipe
from tiercel.config.trained_parts import keeps_start, whole_parts
from tiercel.config_base import Problems, address_fault, shown


def _steps(recipe: OfflineRecipe) -> Problems:
    """Refuse rows that do not fit a microbatch, more than one update a step, and answers that cannot stand together."""
    prompt, budget = recipe.data.max_prompt_tokens, recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and recipe.smallest_microbatch(prompt) > budget:
        what = "the longest row" if recipe.purpose == "sft" else "two answers, twice the longest row"
        if recipe.purpose == "labels" and recipe.learner.form == "repeated":
            what = "two answers, each with a prompt, three times the longest row"
        yield conflict("max_tokens_per_microbatch", budget, what, prompt)

    for key in recipe.optim.changed("minibatches", "rollout_epochs"):
        yield conflict("one update a step", key, getattr(recipe.optim, key), named(recipe.kind))
    if recipe.data.group_by_prefix and recipe.purpose == "labels":
        yield conflict("group_by_prefix", recipe.kind)
    if recipe.purpose != "sft" or recipe.data.group_by_prefix:
        yield from dropout(recipe)


def dropout(recipe: BaseRecipe) -> Problems:
    """Refuse dropout if continuations share a prompt."""
    form = recipe.learner.form
    if recipe.lora is not None and recipe.lora.dropout > 0 and form != "repeated":
        yield conflict("dropout", recipe.lora.dropout, form)


def _pair_loss(recipe: OfflineRecipe) -> Problems:
    if not isinstance(recipe, DpoRecipe):
        return
    dpo = recipe.dpo
    takers = {
        "gamma": ("simpo",),
        "divergence": OF_DIVERGENCES,
        "tau": ("discopop",),
        "label_smoothing": SMOOTHED,
        "wpo": _pair_losses_but(MATCHED),
        "ld_alpha": _pair_losses_but(OF_MEANS),
        "length_normalised": _pair_losses_but(("orpo", *MATCHED)),
        "precompute_reference": _pair_losses_but(WITHOUT_REFERENCE),
    }
    for key in dpo.changed(*takers):
        if dpo.loss not in takers[key]:
            yield conflict("key of another pair loss", key, shown(getattr(dpo, key)), dpo.loss, ", ".join(takers[key]))
    if dpo.divergence != "reverse_kl" and dpo.length_normalised:
        yield conflict("divergence", dpo.divergence)
    if dpo.ld_alpha is not None and dpo.length_normalised:
        yield conflict("ld_alpha", dpo.ld_alpha)
    if dpo.divergence_alpha is not None and dpo.divergence != "alpha":
        yield conflict("divergence_alpha", dpo.divergence_alpha, dpo.divergence)
    if dpo.loss == "exo_pair" and dpo.label_smoothing == 0:
        yield conflict("exo_pair without smoothing")


def _pair_losses_but(left_out: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in PAIR_LOSS_NAMES if name not in left_out)


def _token_loss(recipe: OfflineRecipe) -> Problems:
    if not isinstance(recipe, SftRecipe):
        return
    if recipe.sft.loss == "dft" and recipe.sft.label_smoothing > 0:
        yield conflict("dft and smoothing", recipe.sft.label_smoothing)
    if recipe.sft.neftune_alpha is not None and recipe.data.group_by_prefix:
        yield conflict("neftune_alpha", recipe.sft.neftune_alpha)


def _kept_start(recipe: OfflineRecipe) -> Problems:
    if keeps_start(recipe) and recipe.train.strategy == "deepspeed":
        yield conflict("ZeRO and reference", ", ".join(whole_parts(recipe)))


OFFLINE_RULES: tuple[Callable[[OfflineRecipe], Problems], ...] = (_steps, _pair_loss, _token_loss, _kept_start)


WITHOUT_REWARDS = ("normalise", "entropy_coef", "kl.coef", "kl.estimator", "kl.sync_every", "kl.sync_mix")


def teacher(recipe: GrpoRecipe) -> Problems:
    section = recipe.taught_by
    if section is None:
        return
    key = recipe.teacher_key
    if section.mix != 0.5 and section.divergence != "jsd":
        yield conflict("mix without jsd", key, section.mix, section.divergence)
    if section.top_k is not None and section.divergence == "token":
        yield conflict("top_k of one token", key, section.top_k)
    if section.url is not None:
        yield from _served(recipe, section, section.url, key)
    yield from template_problems(f"{key}.prompt", section.prompt)
    if section.prompt is not None and recipe.rollout.has_turns:
        yield conflict("prompt and turns", key)


def _served(recipe: GrpoRecipe, section: Teacher, url: str, key: str) -> Problems:
    """Check a teacher on a server, which returns the most likely tokens of its own model, at temperature 1."""
    if (fault := address_fault(url)) is not None:
        yield conflict("address of the teacher", key, fault)
    reasons = {"adapter": "serves a whole model", "dtype": "computes in its own dtype (--dtype)"}
    for name in section.changed(*reasons):
        yield conflict("key of a served teacher", key, name, shown(getattr(section, name)), reasons[name])
    if section.top_k is None and section.divergence != "token":
        yield conflict("top_k of a served teacher", key)
    if recipe.rollout.temperature != 1:
        yield conflict("temperature of a served teacher", key, recipe.rollout.temperature)


def template_problems(key: str, template: str | None) -> Problems:
    """Check a text with {prompt} and with names of columns in braces."""
    try:
        fields = [field[1:] for field in Formatter().parse(template or "") if field[1] is not None]
    except ValueError as error:
        yield conflict("template that is none", key, error)
        return
    for name, spec, conversion in fields:
        if not (name or "").isidentifier() or spec or conversion:
            yield conflict("template with another name", key, name)


def distill(recipe: GrpoRecipe) -> Problems:
    """Refuse the keys that only make sense with rewards."""
    if not isinstance(recipe, DistillRecipe):
        return
    if recipe.algorithm.teacher is not None:
        yield conflict("teacher")
    for name, usual in Algorithm().leaves():
        value = attrgetter(name)(recipe.algorithm)
        if value != usual and name != "teacher" and name not in WITHOUT_REWARDS:
            yield conflict("key of rewards in distillation", name, shown(value))
    if recipe.data.eval is not None and not recipe.rewards:
        yield conflict("eval and rewards")
    if recipe.rollout.resample_tries:
        yield conflict("resample_tries", recipe.rollout.resample_tries)
    if recipe.teacher.rows_share and recipe.rollout.has_turns:
        yield conflict("rows_share", recipe.teacher.rows_share)

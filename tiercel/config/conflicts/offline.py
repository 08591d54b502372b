"""Check recipes that learn from the answers in their rows or from a teacher."""

from collections.abc import Callable
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
from tiercel.config.keys import named
from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.schema import BaseRecipe, DistillRecipe, DpoRecipe, GrpoRecipe, OfflineRecipe, SftRecipe
from tiercel.config_base import Keys, Problems, Section, address_fault, shown


def _rows_fit_microbatch(recipe: OfflineRecipe) -> Problems:
    prompt, budget = recipe.data.max_prompt_tokens, recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and recipe.smallest_microbatch(prompt) > budget:
        what = "the longest row" if recipe.purpose == "sft" else "two answers, twice the longest row"
        yield Keys("learner.max_tokens_per_microbatch", "data.max_prompt_tokens").problem(
            f"is {budget}, but must hold {what}: data.max_prompt_tokens is {prompt}"
        )


def _one_update(recipe: OfflineRecipe) -> Problems:
    for key, value in (("minibatches", recipe.optim.minibatches), ("rollout_epochs", recipe.optim.rollout_epochs)):
        if value > 1:
            yield Keys(f"optim.{key}").problem(
                f"is {value}, but a step of {named(recipe.kind)} recipe is one update, because there is no rollout "
                "to split; remove this key, and lower optim.prompts_per_step for smaller updates"
            )


def _last_turn(recipe: OfflineRecipe) -> Problems:
    if recipe.purpose != "sft" and recipe.data.train_turns != "all":
        yield Keys("data.train_turns").problem(
            f"is {recipe.data.train_turns}, but `tiercel {recipe.kind}` trains only on the last answer; remove this key"
        )


def dropout(recipe: BaseRecipe) -> Problems:
    """Refuse dropout if continuations share a prompt."""
    form = recipe.learner.form
    if recipe.lora is not None and recipe.lora.dropout > 0 and form != "repeated":
        yield Keys("lora.dropout", "learner.form").problem(
            f"is {recipe.lora.dropout:g}, but with learner.form {form}, answers share one computation of their "
            "prompt, and dropout would need one for each; use 0, or set learner.form: repeated"
        )


def grouped_rows(recipe: BaseRecipe) -> Problems:
    """Refuse an order of rows by their pictures if the recipe leaves no room for one."""
    data = recipe.data
    if data.rows_per_prefix is not None and not data.group_by_prefix:
        yield Keys("data.rows_per_prefix", "data.group_by_prefix").problem(
            f"is {data.rows_per_prefix}, but data.group_by_prefix is not set; set data.group_by_prefix: true, or "
            "remove this key"
        )
    elif data.group_by_prefix and data.mix:
        yield Keys("data.group_by_prefix", "data.mix").problem(
            "is true, but data.mix takes rows from the files in turn; use one file, or remove one of the two"
        )


def _grouped_answers(recipe: OfflineRecipe) -> Problems:
    if recipe.data.group_by_prefix and recipe.purpose == "labels":
        yield Keys("data.group_by_prefix").problem(
            f"is true, but `tiercel {recipe.kind}` compares a row with the next row's answer; remove this key"
        )


def _shared_dropout(recipe: OfflineRecipe) -> Problems:
    if recipe.purpose != "sft" or recipe.data.group_by_prefix:
        yield from dropout(recipe)


def _pair_loss(recipe: OfflineRecipe) -> Problems:
    if not isinstance(recipe, DpoRecipe):
        return
    dpo = recipe.dpo
    others = tuple(name for name in PAIR_LOSS_NAMES if name not in ("orpo", *MATCHED))
    of_sums = tuple(name for name in PAIR_LOSS_NAMES if name not in OF_MEANS)
    with_reference = tuple(name for name in PAIR_LOSS_NAMES if name not in WITHOUT_REFERENCE)
    for key, is_given, takers in (
        ("gamma", dpo.gamma is not None, ("simpo",)),
        ("divergence", dpo.divergence != "reverse_kl", OF_DIVERGENCES),
        ("tau", dpo.tau is not None, ("discopop",)),
        ("label_smoothing", dpo.label_smoothing > 0, SMOOTHED),
        ("wpo", dpo.wpo, tuple(name for name in PAIR_LOSS_NAMES if name not in MATCHED)),
        ("ld_alpha", dpo.ld_alpha is not None, of_sums),
        ("length_normalised", dpo.length_normalised, others),
        ("precompute_reference", dpo.precompute_reference, with_reference),
    ):
        if is_given and dpo.loss not in takers:
            yield Keys(f"dpo.{key}", "dpo.loss").problem(
                f"is {shown(getattr(dpo, key))}, but the loss {dpo.loss} does not use it; remove this key (it "
                f"belongs to {', '.join(takers)})"
            )
    if dpo.divergence != "reverse_kl" and dpo.length_normalised:
        yield Keys("dpo.divergence", "dpo.length_normalised").problem(
            f"is {dpo.divergence}, but dpo.length_normalised is true, and a divergence needs an answer's "
            "probability, not a mean over its tokens; remove one of the two"
        )
    if dpo.ld_alpha is not None and dpo.length_normalised:
        yield Keys("dpo.ld_alpha", "dpo.length_normalised").problem(
            f"is {dpo.ld_alpha:g}, but dpo.length_normalised is true, which takes means over tokens; remove one of "
            "the two"
        )
    if dpo.divergence_alpha is not None and dpo.divergence != "alpha":
        yield Keys("dpo.divergence_alpha", "dpo.divergence").problem(
            f"is {dpo.divergence_alpha:g}, but dpo.divergence {dpo.divergence} does not use it; set dpo.divergence: "
            "alpha, or remove this key"
        )
    if dpo.loss == "exo_pair" and dpo.label_smoothing == 0:
        yield Keys("dpo.label_smoothing", "dpo.loss").problem(
            "is 0, but the loss exo_pair takes its logarithm; use a small value, such as 0.001"
        )


def _token_loss(recipe: OfflineRecipe) -> Problems:
    if isinstance(recipe, SftRecipe) and recipe.sft.loss == "dft" and recipe.sft.label_smoothing > 0:
        yield Keys("sft.label_smoothing", "sft.loss").problem(
            f"is {recipe.sft.label_smoothing:g}, but the loss dft weights each token only by its own probability; "
            "remove one of the two"
        )


def _noise(recipe: OfflineRecipe) -> Problems:
    if isinstance(recipe, SftRecipe) and recipe.sft.neftune_alpha is not None and recipe.data.group_by_prefix:
        yield Keys("sft.neftune_alpha", "data.group_by_prefix").problem(
            f"is {recipe.sft.neftune_alpha:g}, but data.group_by_prefix is true, so rows share the computation of "
            "their prefix, and noise would need one for each; remove one of the two"
        )


def _kept_start(recipe: OfflineRecipe) -> Problems:
    if keeps_start(recipe) and recipe.train.strategy == "deepspeed":
        yield Keys("train.strategy", "lora", "freeze").problem(
            "is deepspeed, whose ranks each hold only a part of the weights, but the reference is a copy of "
            f"{', '.join(whole_parts(recipe))}, which this recipe trains whole; use fsdp2, or for DPO set "
            "dpo.precompute_reference: true"
        )


OFFLINE_RULES: tuple[Callable[[OfflineRecipe], Problems], ...] = (
    _rows_fit_microbatch,
    _one_update,
    _last_turn,
    _grouped_answers,
    _shared_dropout,
    _pair_loss,
    _token_loss,
    _noise,
    _kept_start,
)


WITHOUT_REWARDS = ("normalise", "entropy_coef", "kl.coef", "kl.estimator", "kl.sync_every", "kl.sync_mix")


def teacher(recipe: GrpoRecipe) -> Problems:
    section = recipe.taught_by
    if section is None:
        return
    key = recipe.teacher_key
    if section.mix != 0.5 and section.divergence != "jsd":
        yield Keys(f"{key}.mix", f"{key}.divergence").problem(
            f"is {section.mix:g}, but {key}.divergence {section.divergence} does not mix distributions; set it to "
            "jsd, or remove this key"
        )
    if section.top_k is not None and section.divergence == "token":
        yield Keys(f"{key}.top_k", f"{key}.divergence").problem(
            f"is {section.top_k}, but {key}.divergence token uses only the sampled token; remove this key"
        )
    if section.url is not None:
        yield from _served(recipe, section, section.url, key)
    yield from template_problems(f"{key}.prompt", section.prompt)
    if section.prompt is not None and recipe.rollout.has_turns:
        yield Keys(f"{key}.prompt", "rollout.tools", "rollout.environment").problem(
            "is set, but with tools or an environment, the turns follow the policy's own prompt; remove this key"
        )


def _served(recipe: GrpoRecipe, section: Teacher, url: str, key: str) -> Problems:
    """Check a teacher on a server, which returns the most likely tokens of its own model, at temperature 1."""
    if (fault := address_fault(url)) is not None:
        yield Keys(f"{key}.url").problem(f"{fault}; use an address such as http://127.0.0.1:8000")
    for name, own in (("adapter", "serves a whole model"), ("dtype", "computes in its own dtype (--dtype)")):
        if getattr(section, name) != Teacher.model_fields[name].default:
            yield Keys(f"{key}.{name}", f"{key}.url").problem(
                f"is {shown(getattr(section, name))}, but the server of {key}.url {own}; remove this key"
            )
    if section.top_k is None and section.divergence != "token":
        yield Keys(f"{key}.top_k", f"{key}.url", f"{key}.divergence").problem(
            f"is required, because a server cannot return the whole vocabulary; set {key}.top_k: 20, or "
            f"{key}.divergence: token"
        )
    if recipe.rollout.temperature != 1:
        yield Keys("rollout.temperature", f"{key}.url").problem(
            f"is {recipe.rollout.temperature:g}, but the server of {key}.url returns the logprobs of a prompt at "
            f"temperature 1; use 1, or remove {key}.url"
        )


def template_problems(key: str, template: str | None) -> Problems:
    """Check a text with {prompt} and with names of columns in braces."""
    try:
        fields = [field[1:] for field in Formatter().parse(template or "") if field[1] is not None]
    except ValueError as error:
        yield Keys(key).problem(f"is not a valid template: {error}; to write a brace as text, double it")
        return
    for name, spec, conversion in fields:
        if not (name or "").isidentifier() or spec or conversion:
            yield Keys(key).problem(
                f"contains {{{name}}}, but may contain only {{prompt}} and names of columns; to write a brace as "
                "text, double it"
            )


def distill(recipe: GrpoRecipe) -> Problems:
    """Refuse the keys that only make sense with rewards."""
    if not isinstance(recipe, DistillRecipe):
        return
    if recipe.algorithm.teacher is not None:
        yield Keys("algorithm.teacher").problem(
            "is set, but the recipe already has the section teacher; remove this key"
        )
    for name, value in _changed(recipe.algorithm, Algorithm(), ""):
        if name not in WITHOUT_REWARDS and not name.startswith("teacher"):
            yield Keys(f"algorithm.{name}").problem(
                f"is {shown(value)}, but distillation learns from the teacher, not from rewards; remove this key, or "
                "use `tiercel grpo` with algorithm.teacher"
            )
    if recipe.data.eval is not None and not recipe.rewards:
        yield Keys("data.eval", "rewards").problem(
            "is set, but there are no rewards to score held-out completions; add some, such as rewards: [{name: "
            "exact}], which are then only measured, or remove this key"
        )
    if recipe.rollout.resample_tries:
        yield Keys("rollout.resample_tries").problem(
            f"is {recipe.rollout.resample_tries}, but distillation does not need rewards that differ; remove this key"
        )
    if recipe.teacher.rows_share and recipe.rollout.has_turns:
        yield Keys("teacher.rows_share", "rollout.tools", "rollout.environment").problem(
            f"is {recipe.teacher.rows_share:g}, but the recipe has tools or an environment, and the answers in rows "
            "have no turns; use 0"
        )


def _changed(section: Section, default: Section, prefix: str) -> list[tuple[str, object]]:
    """List the keys below a section whose value is not the default."""
    found: list[tuple[str, object]] = []
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(default, name)
        if isinstance(value, Section) and isinstance(usual, Section):
            found += _changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            found.append((prefix + name, value))
    return found

"""Judgements on a teacher, and on what `tiercel distill` does not learn from."""

from string import Formatter

from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.teacher import Teacher
from tiercel.config.schema import DistillRecipe, GrpoRecipe
from tiercel.sections import Keys, Problems, Section, address_fault, shown

WITHOUT_REWARDS = ("normalise", "entropy_coef", "kl.coef", "kl.estimator", "kl.sync_every", "kl.sync_mix")


def teacher(recipe: GrpoRecipe) -> Problems:
    section = recipe.taught_by
    if section is None:
        return
    key = recipe.teacher_key
    if section.mix != 0.5 and section.divergence != "jsd":
        yield Keys(f"{key}.mix", f"{key}.divergence").problem(
            f"{section.mix:g} given with {key}.divergence {section.divergence}, which mixes nothing; write "
            "jsd, or remove it"
        )
    if section.top_k is not None and section.divergence == "token":
        yield Keys(f"{key}.top_k", f"{key}.divergence").problem(
            f"{section.top_k} given with {key}.divergence token, which looks at the drawn token alone; remove it"
        )
    if section.url is not None:
        yield from _served(recipe, section, section.url, key)
    yield from template_problems(f"{key}.prompt", section.prompt)
    if section.prompt is not None and recipe.rollout.has_turns:
        yield Keys(f"{key}.prompt", "rollout.tools", "rollout.environment").problem(
            "given with tools or an environment, whose turns follow the policy's own prompt; remove it"
        )


def _served(recipe: GrpoRecipe, section: Teacher, url: str, key: str) -> Problems:
    """Judge a teacher on a server, which tells the likeliest words of its own model, at temperature 1."""
    if (fault := address_fault(url)) is not None:
        yield Keys(f"{key}.url").problem(f"{fault}; write it like http://127.0.0.1:8000")
    for name, own in (("adapter", "serves a whole model"), ("dtype", "computes in its own dtype (--dtype)")):
        if getattr(section, name) != Teacher.model_fields[name].default:
            yield Keys(f"{key}.{name}", f"{key}.url").problem(
                f"{shown(getattr(section, name))} given with {key}.url, whose server {own}; remove it"
            )
    if section.top_k is None and section.divergence != "token":
        yield Keys(f"{key}.top_k", f"{key}.url", f"{key}.divergence").problem(
            f"missing; a server cannot tell the whole vocabulary; write {key}.top_k: 20, or {key}.divergence: token"
        )
    if recipe.rollout.temperature != 1:
        yield Keys("rollout.temperature", f"{key}.url").problem(
            f"{recipe.rollout.temperature:g} given with {key}.url, but a server tells what a prompt's tokens have "
            f"at temperature 1; write 1, or remove {key}.url"
        )


def template_problems(key: str, template: str | None) -> Problems:
    """Judge a text with {prompt} and names of columns."""
    try:
        fields = [field[1:] for field in Formatter().parse(template or "") if field[1] is not None]
    except ValueError as error:
        yield Keys(key).problem(f"is no template: {error}; a brace of the text is written twice")
        return
    for name, spec, conversion in fields:
        if not (name or "").isidentifier() or spec or conversion:
            yield Keys(key).problem(
                f"has {{{name}}}; it takes {{prompt}} and names of columns; a brace of the text is written twice"
            )


def distill(recipe: GrpoRecipe) -> Problems:
    """Refuse what only rewards have a use for."""
    if not isinstance(recipe, DistillRecipe):
        return
    if recipe.algorithm.teacher is not None:
        yield Keys("algorithm.teacher").problem("given beside teacher, of which a recipe has one; remove it")
    for name, value in _changed(recipe.algorithm, Algorithm(), ""):
        if name not in WITHOUT_REWARDS and not name.startswith("teacher"):
            yield Keys(f"algorithm.{name}").problem(
                f"{shown(value)} given, but distillation learns from the teacher, not from rewards; remove it, or "
                "use `tiercel grpo` with algorithm.teacher"
            )
    if recipe.data.eval is not None and not recipe.rewards:
        yield Keys("data.eval", "rewards").problem(
            "given without rewards, by which held-out completions are scored; add some, such as "
            "rewards: [{name: exact}], which then only measure, or remove it"
        )
    if recipe.rollout.resample_tries:
        yield Keys("rollout.resample_tries").problem(
            f"{recipe.rollout.resample_tries} given, but distillation needs no rewards that differ; remove it"
        )
    if recipe.teacher.rows_share and recipe.rollout.has_turns:
        yield Keys("teacher.rows_share", "rollout.tools", "rollout.environment").problem(
            f"{recipe.teacher.rows_share:g} given with tools or an environment; answers of rows have no turns; write 0"
        )


def _changed(section: Section, default: Section, prefix: str) -> list[tuple[str, object]]:
    """List the keys below a section that have another value than their default."""
    found: list[tuple[str, object]] = []
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(default, name)
        if isinstance(value, Section) and isinstance(usual, Section):
            found += _changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            found.append((prefix + name, value))
    return found

"""`tiercel plan --fit`: the nearest recipe that fits a memory, and what each of its changes saves and costs.

Keys that do not change a run's result are tried first (`remedies`). If they are not enough, weights or moments get
fewer bits. If that is not enough either, completions and prompts become shorter and pictures smaller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.config.yaml_text import render
from tiercel.log import logger
from tiercel.planning.devices import Machine
from tiercel.planning.options import Option, measure, option, study
from tiercel.planning.plan import make_plan
from tiercel.planning.remedies import Changes, words, written

SHARES = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8)  # of the recipe's lengths, in the order in which they are tried
SHORTEST_COMPLETION, SHORTEST_PROMPT = 64, 256
UNIT = 16  # lengths are multiples of this
COMPLETION, PROMPT, PIXELS = "rollout.max_new_tokens", "data.max_prompt_tokens", "model.max_pixels"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeChange:
    """A changed key. The bytes of a rank's peak and the seconds of a step are the values before the change minus those
    after it."""

    key: str
    before: Any
    after: Any
    saved_bytes: int
    saved_seconds: float | None  # None if there are no figures of a device

    @property
    def line(self) -> str:
        """Return the change as one line."""
        moved = f"{'saves' if self.saved_bytes >= 0 else 'takes'} {abs(self.saved_bytes) / 1e9:.1f} GB"
        if self.saved_seconds is not None:
            kind = "saves" if self.saved_seconds >= 0 else "costs"
            moved += f", {kind} {abs(self.saved_seconds):.1f} s a step"
        return f"{self.key}: {written(self.before)} -> {written(self.after)}: {moved}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A recipe that fits, and the memory and time of its strategy."""

    recipe: Recipe
    option: Option
    changes: tuple[RecipeChange, ...]

    @property
    def text(self) -> str:
        """Return the recipe as text: the keys that were given, and those that changed."""
        memory, seconds = self.option.memory.peak / 1e9, sum(self.option.seconds.values())
        head = [f"{memory:.1f} GB on each rank at most, {seconds:.1f} s a step, by `tiercel plan`."]
        lines = [f"# {line}" for line in (*head, *(change.line for change in self.changes))]
        return "\n".join([*lines, render(self.recipe.model_dump(mode="json", exclude_unset=True))])


def find_fit(recipe: Recipe, machine: Machine) -> Fit | None:
    """Find the nearest recipe that fits the machine's ranks, or return None if none fits. Logs what is tried."""
    has_experts = False  # which the first plan tells; their weights cannot be quantised
    for rung in _ladder(recipe):
        wanted = {key: value for key, value in rung.items() if not (has_experts and key == "model.quantize")}
        if rung and not wanted:
            continue  # without the quantisation it is the recipe itself
        lighter = recipe.with_values(wanted)
        if rule_problems(lighter):
            continue
        logger.info(f"trying {words(wanted) or 'the recipe as it is'}")
        plan = make_plan(lighter, machine, more_ranks=(1,))
        has_experts = plan.sizes.expert_weights > 0
        if plan.chosen is not None or plan.remedy is not None:
            changes = {**wanted, **(plan.remedy.changes if plan.remedy else {})}
            judged = tuple(_judged(recipe, changes, machine, plan.shown))
            return Fit(recipe=recipe.with_values(changes), option=plan.shown, changes=judged)
    return None


def output_file(recipe: Path, size: str) -> Path:
    """Return the path of a fitting recipe's file, next to the recipe."""
    return recipe.with_name(f"{recipe.stem}-{size.replace(' ', '').lower()}{recipe.suffix}")


def _ladder(recipe: Recipe) -> Iterator[Changes]:
    """Yield the changes that affect the result, from none to all."""
    fewer_bits: dict[str, Any] = {}
    yield fewer_bits
    if recipe.lora is not None and recipe.model.quantize is None:
        fewer_bits = {"model.quantize": "nf4"}
        yield fewer_bits
    if recipe.optim.name == "adamw":
        fewer_bits = fewer_bits | {"optim.name": "adamw_8bit"}
        yield fewer_bits
    is_sampled = isinstance(recipe, GrpoRecipe) and not recipe.rollout.has_turns
    for share in SHARES:
        if is_sampled and (shorter := _shorter(recipe, COMPLETION, share, SHORTEST_COMPLETION)):
            yield fewer_bits | shorter
    least = _shorter(recipe, COMPLETION, SHARES[-1], SHORTEST_COMPLETION) if is_sampled else {}
    for share in SHARES:
        if shorter := _shorter(recipe, PROMPT, share, SHORTEST_PROMPT):
            smaller = {PIXELS: round(recipe.model.max_pixels * share)} if recipe.model.max_pixels else {}
            yield fewer_bits | least | shorter | smaller


def _shorter(recipe: Recipe, key: str, share: float, least: int) -> dict[str, Any]:
    """Return a shorter length for a key, or nothing if it would not be shorter."""
    present = attrgetter(key)(recipe)
    length = max(least, round(present * share / UNIT) * UNIT)
    return {key: length} if length < present else {}


def _judged(recipe: Recipe, changes: Changes, machine: Machine, fitting: Option) -> Iterator[RecipeChange]:
    """Yield each change with a comparison of the recipe before and after it, in microbatches of the size that is asked
    for."""

    def judge(count: int) -> Option:
        subject = study(recipe.with_values(dict(islice(changes.items(), count))), None)
        return option(subject, measure(subject), machine, fitting.memory.strategy)

    options = [*map(judge, range(len(changes))), fitting]
    for (key, value), (before, after) in zip(changes.items(), pairwise(options), strict=True):
        seconds = sum(before.seconds.values()) - sum(after.seconds.values())
        yield RecipeChange(
            key=key,
            before=attrgetter(key)(recipe),
            after=value,
            saved_bytes=before.memory.peak - after.memory.peak,
            saved_seconds=seconds if machine.device else None,
        )

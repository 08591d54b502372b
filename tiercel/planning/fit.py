"""`tiercel plan --fit`: the nearest recipe that fits a memory, and what each of its changes saves and costs.

Keys that do not change a run's result are tried first (`remedies`). If they are not enough, weights or moments get
fewer bits. If that is not enough either, completions and prompts become shorter and pictures smaller.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.config.yaml_text import render
from tiercel.planning.machine import Machine
from tiercel.planning.options import Option, Subject, admitted, measure, option, study
from tiercel.planning.remedies import TOKENS, Changes, find_remedy, value_at, with_changes, written

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


def find_fit(recipe: Recipe, machine: Machine, say: Callable[[str], None]) -> Fit | None:
    """Find the nearest recipe that fits the machine's ranks, or return None if none fits. `say` is told what is
    tried."""
    for wanted in _ladder(recipe):
        subject = _with(recipe, wanted)
        if rule_problems(subject.recipe):
            continue
        say(f"trying {', '.join(f'{key}: {written(value)}' for key, value in wanted.items()) or 'the recipe as it is'}")
        measured = measure(subject)
        options = [option(subject, measured, machine, name) for name in admitted(subject.recipe, machine.ranks)]
        found = next((each for each in options if each.fits), None)
        more: Changes = {}
        if found is None:
            remedy = find_remedy(subject, measured, machine, more_ranks=(1,))
            if remedy is None:
                continue
            found, more = remedy.option, remedy.changes
        in_order = {**wanted, **{key: value for key, value in more.items() if key != TOKENS}}
        if TOKENS in more:
            in_order[TOKENS] = more[TOKENS]
        return Fit(
            recipe=_with(recipe, in_order).recipe,
            option=found,
            changes=tuple(_judged(recipe, in_order, machine, found)),
        )
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
    present = value_at(recipe, key)
    length = max(least, round(present * share / UNIT) * UNIT)
    return {key: length} if length < present else {}


def _with(recipe: Recipe, changes: Changes) -> Subject:
    """Count the sizes of the model of the recipe with these changes."""
    return study(with_changes(recipe, changes), None)


def _judged(recipe: Recipe, changes: Changes, machine: Machine, fitting: Option) -> Iterator[RecipeChange]:
    """Yield each change with a comparison of the recipe before and after it, in microbatches of the size that is asked
    for."""

    def judge(count: int) -> Option:
        subject = _with(recipe, dict(list(changes.items())[:count]))
        return option(subject, measure(subject), machine, fitting.memory.strategy)

    before = judge(0)
    for number, (key, value) in enumerate(changes.items(), start=1):
        after = judge(number) if number < len(changes) else fitting
        seconds = sum(before.seconds.values()) - sum(after.seconds.values())
        yield RecipeChange(
            key=key,
            before=value_at(recipe, key),
            after=value,
            saved_bytes=before.memory.peak - after.memory.peak,
            saved_seconds=seconds if machine.device else None,
        )
        before = after

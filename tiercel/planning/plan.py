"""The plan of a recipe on given GPUs: the memory of each strategy, which one to take, and what to change if none
fits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.planning.devices import Machine
from tiercel.planning.memory import Measured, cached_rows
from tiercel.planning.options import Option, admitted, measure, memory_of, option, study
from tiercel.planning.probe import NOTHING, VisionBytes
from tiercel.planning.remedies import MORE_RANKS, Changes, Remedy, changed, engines, find_remedy, words
from tiercel.planning.sizes import ModelSizes

ENOUGH_ROWS = 16  # completions that a vLLM engine should be able to hold at once if it is advised


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """All options, the one to take, and the change to make if none fits."""

    machine: Machine
    sizes: ModelSizes
    tokens: int  # of a microbatch: the recipe's number, or what `auto` chooses
    prompt_tokens: int
    idle_ranks: int  # ranks without a completion, or a conversation, in a step
    options: tuple[Option, ...]
    chosen: str | None
    reason: str
    change: str | None  # the remedy in words
    remedy: Remedy | None  # the nearest recipe that fits, if no option does
    flex_problem: str | None = None  # why the card cannot run FlexAttention for the model
    measures_tower: bool = True  # whether the passes of the vision tower are counted

    @property
    def shown(self) -> Option:
        """Return the option to show: the one to take, else that of the nearest recipe that fits, else the smallest."""
        if self.chosen is not None:
            return next(each for each in self.options if each.memory.strategy == self.chosen)
        if self.remedy is not None:
            return self.remedy.option
        return min(self.options, key=lambda each: each.memory.peak)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        remedy = self.remedy
        return {
            **asdict(self),
            "options": [each.as_json() for each in self.options],
            "remedy": remedy and {**asdict(remedy), "option": remedy.option.as_json()},
        }


def make_plan(
    recipe: Recipe, machine: Machine, prompt_tokens: int | None = None, more_ranks: Sequence[int] = MORE_RANKS
) -> MemoryPlan:
    """Judge every strategy that the recipe and the number of ranks allow. If none fits, find what would, on as many
    times the ranks as `more_ranks` has."""
    subject = study(recipe, prompt_tokens)
    measured = measure(subject)
    options = tuple(option(subject, measured, machine, name) for name in admitted(recipe, machine.ranks))
    chosen = next((each for each in options if each.fits), None)
    remedy = None if chosen else find_remedy(subject, measured, machine, more_ranks)
    room = machine.memory_bytes / 1e9
    if chosen is None:
        reason = f"nothing fits into {room:.0f} GB"
    elif recipe.train.strategy != "auto":
        reason = "as the recipe says"
    elif machine.ranks == 1:
        reason = f"which fits into {room:.0f} GB"
    else:
        reason = f"the least communication of what fits into {room:.0f} GB"
    return MemoryPlan(
        machine=machine,
        sizes=subject.sizes,
        tokens=subject.asked_tokens or (chosen or min(options, key=lambda each: each.memory.peak)).tokens,
        prompt_tokens=subject.prompt_tokens,
        idle_ranks=max(0, machine.ranks - recipe.optim.prompts_per_step * subject.composition.group_size),
        options=options,
        chosen=chosen.memory.strategy if chosen else None,
        reason=reason,
        change=remedy.words(machine.ranks) if remedy else None,
        remedy=remedy,
        flex_problem=subject.flex_problem(machine),
        measures_tower=measured.vision != VisionBytes(),
    )


def gathering_problem(recipe: GrpoRecipe, machine: Machine, strategy: str) -> str | None:
    """Return why the local engine cannot gather the whole policy on a rank that holds a shard, with what to write
    instead, or None if it can. The longest prompts that the recipe allows are assumed."""
    subject = study(recipe, None)
    sampling = memory_of(subject, Measured(learn=NOTHING, step=NOTHING), machine, strategy)  # the learner does nothing
    needed = sampling(0).phases["rollout"]
    if needed <= machine.memory_bytes:
        return None

    def holds_rows(changes: Changes) -> bool:
        each = changed(subject, changes)
        rollout = each.rollout(machine)
        assert rollout is not None
        return cached_rows(each.recipe, each.sizes, rollout) >= ENOUGH_ROWS

    changes = next((each for each in engines(recipe, machine) if each and holds_rows(each)), None)
    change = "rollout.engine: vllm-server, on other machines" if changes is None else words(changes)
    return (
        f"train.strategy: {strategy} with rollout.engine: local gathers the whole policy on every rank to sample, "
        f"{needed / 1e9:.1f} GB of {machine.memory_bytes / 1e9:.1f} GB; sample by vLLM: {change}"
    )

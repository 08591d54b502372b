"""The memory and time of a recipe on given GPUs, under each strategy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from tiercel.config.conflicts.rewards import reward_models
from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.models.layers.attention import heads_of
from tiercel.packing.kernel_table import fit_of, known_fits
from tiercel.packing.pass_options import chosen_form
from tiercel.planning.devices import Device, Machine
from tiercel.planning.frozen_models import FrozenBytes, held_by_rank, reward_model_size, teacher_size
from tiercel.planning.memory import Layout, Measured, RankMemory, RolloutLoad, rank_memory, step_rollout
from tiercel.planning.probe import (
    Composition,
    LinearBytes,
    ProbedModel,
    UpdateBytes,
    fitted,
    gathered_bytes,
    packed_case,
    refitted,
    update_bytes,
)
from tiercel.planning.seconds import phase_seconds
from tiercel.planning.sizes import ModelSizes, bare_family, count, read_config
from tiercel.planning.vision_probe import vision_bytes


def flex_problem(config: Any, dtype: str, device: Device | None) -> str | None:
    """Return why FlexAttention does not fit the card for a decoder with this config, or None if it fits or if the table
    does not have the card. A run then takes `learner.form: dense`."""
    if device is None:
        return None
    for size in sorted({heads.size for heads in heads_of(config)}):
        fit = fit_of(known_fits(), device.capability, size, dtype)
        if fit is not None and fit.problem:
            return f"FlexAttention does not fit a {device.name} for heads of {size} in {dtype}: {fit.problem}"
    return None


AUTO_UNIT = 1024  # tokens
MARGIN = 15  # sixteenths of the largest microbatch that fits, since a smaller one is cut and measured differently
PROBED_GROUPS = 4  # at most; attention takes groups one by one, so further groups add only their tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One strategy on the machine."""

    memory: RankMemory
    fits: bool
    tokens: int  # of a microbatch: the recipe's number, or what `auto` chooses
    largest_tokens: int  # the largest learner.max_tokens_per_microbatch that fits; 0 if none does
    auto_tokens: int  # what learner.max_tokens_per_microbatch: auto chooses; 0 if nothing fits
    seconds: Mapping[str, float]  # of a step, by phase; empty if there are no figures of a device

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        return {**asdict(self), "memory": self.memory.as_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject(ProbedModel):
    """A recipe's model, with its sizes counted, ready to be measured."""

    recipe: Recipe
    sizes: ModelSizes
    prompt_tokens: int
    reward_models: tuple[FrozenBytes, ...]
    teacher: FrozenBytes | None

    def rollout(self, machine: Machine) -> RolloutLoad | None:
        """Compute the recipe's rollout on one rank of the machine, or return None if the recipe does not sample."""
        if not isinstance(self.recipe, GrpoRecipe):
            return None
        return replace(
            step_rollout(self.recipe, machine.ranks, self.prompt_tokens, machine.memory_bytes),
            reward_models=held_by_rank(self.reward_models, on_gpu=machine.is_gpu),
            teacher=held_by_rank([self.teacher] if self.teacher else [], on_gpu=machine.is_gpu),
        )

    def flex_problem(self, machine: Machine) -> str | None:
        """Return why the machine's card cannot run FlexAttention for this model, or None if it can, as far as is
        known."""
        return flex_problem(self.config.get_text_config(), self.recipe.model.dtype, machine.device)

    def layout(self, machine: Machine, strategy: str) -> Callable[..., Layout]:
        """Return what makes the layout of a strategy on the machine, for `tokens` of a microbatch."""
        flex_fits = self.flex_problem(machine) is None
        return partial(Layout, strategy=strategy, ranks=machine.ranks, on_gpu=machine.is_gpu, flex_fits=flex_fits)

    def learnt_tokens(self, machine: Machine) -> int:
        """Return the tokens that the rank with the most rows learns from in a step, with prompts once per group. If
        several ranks learn them together, return the tokens of these ranks."""
        data_parallel_size = max(1, machine.ranks // self.recipe.train.context_parallel)
        return -(-self.recipe.optim.prompts_per_step // data_parallel_size) * self.composition.group_tokens

    def auto_tokens(self, machine: Machine, most: int) -> int:
        """Return what `learner.max_tokens_per_microbatch: auto` chooses if at most `most` tokens fit. It is less than
        that, because real microbatches are cut differently, and no more than a step has. It is a multiple of 1024 if
        that holds a prompt and a completion. Returns 0 if nothing fits."""
        wanted = min(most * MARGIN // 16, -(-self.learnt_tokens(machine) // AUTO_UNIT) * AUTO_UNIT)
        return max(self.smallest_tokens, wanted // AUTO_UNIT * AUTO_UNIT) if most else 0

    @property
    def asked_tokens(self) -> int | None:
        """Return the tokens of a microbatch that the recipe asks for, or None for auto."""
        asked = self.recipe.learner.max_tokens_per_microbatch
        return None if asked == "auto" else asked

    @property
    def smallest_tokens(self) -> int:
        """Return the tokens of the smallest microbatch that the recipe's rows may need."""
        recipe = self.recipe.with_values({"learner.form": "repeated"}) if self.sizes.obstacle else self.recipe
        return recipe.smallest_microbatch(self.prompt_tokens)

    @property
    def composition(self) -> Composition:
        if isinstance(self.recipe, GrpoRecipe):
            rollout = self.recipe.rollout
            return Composition(
                prompt_tokens=self.prompt_tokens, completion_tokens=rollout.longest, group_size=rollout.group_size
            )
        answer = max(1, self.prompt_tokens // 4)  # the scored tokens of a conversation; assumed
        answers = 2 if self.recipe.purpose == "pairs" else 1
        return Composition(prompt_tokens=self.prompt_tokens - answer, completion_tokens=answer, group_size=answers)


def study(recipe: Recipe, prompt_tokens: int | None) -> Subject:
    """Count the sizes of the recipe's model. Raises ModelError or EnvironmentProblem if its config cannot be read or
    fetched."""
    path, config = read_config(recipe.model)
    family = bare_family(path, config)
    return Subject(
        recipe=recipe,
        config=config,
        family=family,
        sizes=count(recipe, config, family),
        prompt_tokens=prompt_tokens or recipe.data.max_prompt_tokens,
        reward_models=tuple(map(reward_model_size, reward_models(recipe))),
        teacher=teacher_size(recipe),
    )


def measure(subject: Subject) -> Measured:
    """Run the learner on fake tensors at four points. FlexAttention needs a GPU, but for the backward pass it keeps the
    same tensors as the CPU's form: queries, keys, values, outputs and their log-sum-exp."""
    recipe = subject.recipe
    asked = "auto" if recipe.learner.form == "flex" else recipe.learner.form
    form = chosen_form(asked, torch.device("cpu"), subject.sizes.obstacle)
    few_groups = PROBED_GROUPS * subject.composition.group_tokens
    tokens = max(min(subject.asked_tokens or few_groups, few_groups), subject.smallest_tokens)

    packed = cache(partial(packed_case, subject.composition, dimensions=subject.family.position_dimensions))

    @cache
    def at(layers: int, count: int, compiled: bool = False) -> UpdateBytes:
        return update_bytes(subject, layers, packed(count), form, compiled=compiled)

    learn = fitted(lambda layers, count: at(layers, count).learn, tokens)

    @cache
    def compiled() -> LinearBytes:
        try:
            return refitted(learn, lambda layers: at(layers, tokens, True).learn, tokens)
        finally:
            torch._dynamo.reset()  # these graphs must not count among those of a run in this process

    @cache
    def gathered() -> LinearBytes:
        return fitted(lambda layers, count: gathered_bytes(subject, layers, packed(count), form), tokens)

    return Measured(
        learn=learn,
        compiled=compiled,
        gathered=gathered,
        step=fitted(lambda layers, count: at(layers, count).step, tokens),
        prefill=fitted(lambda layers, count: at(layers, count).prefill, tokens),
        vision=vision_bytes(subject),
        vision_share=subject.composition.prompt_tokens / subject.composition.group_tokens,
    )


def admitted(recipe: Recipe, ranks: int) -> Sequence[str]:
    """Return the strategies to judge: the recipe's own, or all that this number of ranks allows."""
    if recipe.train.strategy != "auto":
        return [recipe.train.strategy]
    return [
        kind.name
        for kind in STRATEGY_KINDS.values()
        if kind.is_alone == (ranks == 1) and not strategy_problems(recipe, kind.name)
    ]


def strategy_problems(recipe: Recipe, name: str) -> list[str]:
    """Return why the recipe's rules refuse a strategy."""
    problems = rule_problems(recipe.with_values({"train.strategy": name}))
    return [problem.text for problem in problems if "train.strategy" in (problem.key, *problem.also)]


def memory_of(subject: Subject, measured: Measured, machine: Machine, strategy: str) -> Callable[[int], RankMemory]:
    """Return the function from the tokens of a microbatch to the memory of a rank."""
    rollout, layout = subject.rollout(machine), subject.layout(machine, strategy)
    return lambda tokens: rank_memory(subject.recipe, subject.sizes, measured, rollout, layout(tokens=tokens))


def option(subject: Subject, measured: Measured, machine: Machine, strategy: str) -> Option:
    """Compute the memory and time of one strategy with the recipe's microbatches."""
    held = memory_of(subject, measured, machine, strategy)
    most = largest(lambda tokens: held(tokens).fits_into(machine), subject.smallest_tokens)
    auto = subject.auto_tokens(machine, most)
    tokens = subject.asked_tokens or auto or subject.smallest_tokens
    memory, device, layout = held(tokens), machine.device, subject.layout(machine, strategy)(tokens=tokens)
    learnt, rollout = subject.learnt_tokens(machine), subject.rollout(machine)
    return Option(
        memory=memory,
        fits=memory.fits_into(machine),
        tokens=tokens,
        largest_tokens=most,
        auto_tokens=auto,
        seconds={} if device is None else phase_seconds(subject.recipe, subject.sizes, rollout, device, layout, learnt),
    )


def largest(fits: Callable[[int], bool], smallest: int) -> int:
    """Find the largest number of tokens that fits by bisection. Returns 0 if the smallest number does not fit."""
    if not fits(smallest):
        return 0
    low, high = smallest, smallest * 2
    while fits(high) and high < 2**24:
        low, high = high, high * 2
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

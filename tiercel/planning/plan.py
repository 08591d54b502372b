"""The plan of a recipe on given GPUs: what each strategy would hold, which to take, what to change where none fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from tiercel.config.rules import rule_problems
from tiercel.config.schema import GrpoRecipe, SftRecipe
from tiercel.learner.forms import chosen_form
from tiercel.models.family import Family
from tiercel.planning.memory import Measured, RankMemory, Rollout, cached_rows, rank_memory, step_rollout
from tiercel.planning.probe import Composition, LinearBytes, UpdateBytes, fitted, packed_case, update_bytes
from tiercel.planning.reward_models import RewardModelSize, held_by_rank, reward_model_sizes
from tiercel.planning.seconds import Device, phase_seconds
from tiercel.planning.sizes import ModelSizes, bare_family, count, read_config

MARGIN = 15  # sixteenths of what just fits: a smaller microbatch is cut otherwise, and measured a little otherwise
ENOUGH_ROWS = 16  # that a vLLM engine should hold at a time before it is advised
PREFERENCE = ("single", "ddp", "fsdp2", "deepspeed")  # the first that fits: less communication before more


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What is planned for."""

    ranks: int
    memory_bytes: int  # of each
    device: Device | None  # None: a CPU, of which no seconds are foretold

    @property
    def is_gpu(self) -> bool:
        return self.device is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One strategy on the machine."""

    memory: RankMemory
    fits: bool
    largest_tokens: int  # the greatest learner.max_tokens_per_microbatch that would fit; 0: none
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All options, the one to take, and the change to make where there is none."""

    machine: Machine
    sizes: ModelSizes
    tokens: int
    prompt_tokens: int
    options: tuple[Option, ...]
    chosen: str | None
    reason: str
    change: str | None  # the nearest recipe that fits

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A recipe's model, counted and ready to be measured."""

    recipe: SftRecipe | GrpoRecipe
    config: Any
    family: Family
    sizes: ModelSizes
    prompt_tokens: int
    reward_models: tuple[RewardModelSize, ...]

    def rollout(self, machine: Machine) -> Rollout | None:
        if not isinstance(self.recipe, GrpoRecipe):
            return None
        rollout = step_rollout(self.recipe, machine.ranks, self.prompt_tokens, machine.memory_bytes)
        return replace(rollout, reward_models=held_by_rank(self.reward_models, on_gpu=machine.is_gpu))

    @property
    def smallest_tokens(self) -> int:
        """A microbatch holds a prompt and a completion."""
        return self.prompt_tokens + self.composition.completion_tokens

    @property
    def composition(self) -> Composition:
        if isinstance(self.recipe, GrpoRecipe):
            rollout = self.recipe.rollout
            return Composition(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=rollout.max_new_tokens,
                group_size=rollout.group_size,
            )
        answer = max(1, self.prompt_tokens // 4)  # of a conversation's tokens, those that are scored
        return Composition(prompt_tokens=self.prompt_tokens - answer, completion_tokens=answer, group_size=1)


def study(recipe: SftRecipe | GrpoRecipe, prompt_tokens: int | None) -> Subject:
    """Count the recipe's model. Raises ModelError or EnvironmentProblem where its config cannot be had."""
    path, config = read_config(recipe.model)
    family = bare_family(path, config)
    return Subject(
        recipe=recipe,
        config=config,
        family=family,
        sizes=count(recipe, config, family),
        prompt_tokens=prompt_tokens or recipe.data.max_prompt_tokens,
        reward_models=reward_model_sizes(recipe),
    )


def measure(subject: Subject) -> Measured:
    """Run the learner on fake tensors at four points. FlexAttention has no form without a GPU; what it keeps for the
    backward pass is what the CPU's form keeps: queries, keys, values, outputs and their log-sum-exp."""
    recipe, family = subject.recipe, subject.family
    asked = "auto" if recipe.learner.form == "flex" else recipe.learner.form
    form = chosen_form(asked, torch.device("cpu"), subject.sizes.obstacle)
    tokens = max(recipe.learner.max_tokens_per_microbatch, subject.smallest_tokens)

    packed = cache(partial(packed_case, subject.composition, dimensions=family.position_dimensions))

    @cache
    def at(layers: int, count: int) -> UpdateBytes:
        before = packed(min(count, subject.smallest_tokens))
        return update_bytes(recipe, family, subject.config, layers, before, packed(count), form)

    return Measured(
        learn=fitted(lambda layers, count: at(layers, count).learn, tokens),
        step=fitted(lambda layers, count: at(layers, count).step, tokens),
    )


def make_plan(recipe: SftRecipe | GrpoRecipe, machine: Machine, prompt_tokens: int | None = None) -> Plan:
    """Judge every strategy that the recipe and the number of ranks admit."""
    subject = study(recipe, prompt_tokens)
    measured = measure(subject)
    tokens = recipe.learner.max_tokens_per_microbatch
    options = tuple(option(subject, measured, machine, name, tokens) for name in admitted(recipe, machine.ranks))
    chosen = next((each for each in options if each.fits), None)
    room = machine.memory_bytes / 1e9
    if chosen is None:
        reason = f"nothing fits into {room:.0f} GB"
    elif recipe.train.strategy != "auto":
        reason = "as the recipe says"
    else:
        reason = f"the least communication of what fits into {room:.0f} GB"
    return Plan(
        machine=machine,
        sizes=subject.sizes,
        tokens=tokens,
        prompt_tokens=subject.prompt_tokens,
        options=options,
        chosen=chosen.memory.strategy if chosen else None,
        reason=reason,
        change=None if chosen else nearest_change(subject, measured, machine),
    )


def admitted(recipe: SftRecipe | GrpoRecipe, ranks: int) -> Sequence[str]:
    """Strategies to judge: the recipe's own, or all that go with the number of ranks."""
    if recipe.train.strategy != "auto":
        return [recipe.train.strategy]
    return ["single"] if ranks == 1 else [name for name in PREFERENCE[1:] if not strategy_problems(recipe, name)]


def strategy_problems(recipe: SftRecipe | GrpoRecipe, name: str) -> list[str]:
    """Why the recipe's own rules refuse a strategy."""
    asked = recipe.model_copy(update={"train": recipe.train.model_copy(update={"strategy": name})})
    return [problem.text for problem in rule_problems(asked) if "train.strategy" in (problem.key, *problem.also)]


def option(subject: Subject, measured: Measured, machine: Machine, strategy: str, tokens: int) -> Option:
    """One strategy with microbatches of so many tokens."""
    rollout = subject.rollout(machine)

    def held(count: int) -> RankMemory:
        return rank_memory(
            subject.recipe,
            subject.sizes,
            measured,
            rollout,
            strategy=strategy,
            ranks=machine.ranks,
            tokens=count,
            on_gpu=machine.is_gpu,
        )

    memory = held(tokens)
    seconds: Mapping[str, float] = {}
    if rollout is not None and machine.device is not None:
        seconds = phase_seconds(
            subject.recipe,
            subject.sizes,
            rollout,
            machine.device,
            strategy=strategy,
            ranks=machine.ranks,
            tokens=tokens,
        )
    return Option(
        memory=memory,
        fits=memory.fits(machine.memory_bytes),
        largest_tokens=_largest(lambda count: held(count).fits(machine.memory_bytes), subject.smallest_tokens),
        seconds=seconds,
    )


def _largest(fits: Any, smallest: int) -> int:
    """The greatest number of tokens that fits, by halving; 0 where the smallest does not."""
    if not fits(smallest):
        return 0
    low, high = smallest, smallest * 2
    while fits(high) and high < 2**24:
        low, high = high, high * 2
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def nearest_change(subject: Subject, measured: Measured, machine: Machine) -> str | None:
    """The first of these that fits, in the order of what they cost: smaller microbatches, checkpointing, another
    strategy, vLLM over several ranks, offloading, more GPUs; each keeps what was written before it except where it
    replaces it. None where none of them does."""
    names = admitted(subject.recipe, machine.ranks)
    if text := _smaller(subject, measured, machine, names):
        return text
    prefix = ""
    if not subject.recipe.learner.gradient_checkpointing:
        prefix = "learner.gradient_checkpointing: true"
        subject = _changed(subject, learner={"gradient_checkpointing": True})
        measured = measure(subject)
        if text := _fitting(subject, measured, machine, names):
            return _joined(prefix, text)
    if machine.ranks > 1:
        others = [name for name in PREFERENCE[1:] if name not in names and not strategy_problems(subject.recipe, name)]
        if text := _fitting(subject, measured, machine, others):
            return _joined(prefix, text)
        for change, engine in _shared_engines(subject, machine):
            if text := _fitting(engine, measured, machine, [*names, *others]):
                return _joined(prefix, change, text)
        if text := _offloaded(subject, measured, machine):
            return _joined(prefix, text)
    for factor in (2, 4, 8, 16, 32):
        more = replace(machine, ranks=machine.ranks * factor)
        wanted = names if subject.recipe.train.strategy != "auto" else ["fsdp2"]
        if text := _fitting(subject, measured, more, wanted):
            return _joined(f"{more.ranks} GPUs", prefix, text)
    return None


def gathering_problem(recipe: GrpoRecipe, machine: Machine, strategy: str) -> str | None:
    """Why the local engine cannot have the whole policy on a rank that holds a share of it, and what to write instead;
    None where it can. Judged by the longest prompts that the recipe admits."""
    subject = study(recipe, None)
    nothing = LinearBytes(constant=0, per_layer=0, per_token=0, per_layer_token=0)
    memory = rank_memory(
        recipe,
        subject.sizes,
        Measured(learn=nothing, step=nothing),
        subject.rollout(machine),
        strategy=strategy,
        ranks=machine.ranks,
        tokens=0,
        on_gpu=machine.is_gpu,
    )
    needed = memory.phases["rollout"]
    if needed <= machine.memory_bytes:
        return None
    change = next(
        (change for change, _ in _shared_engines(subject, machine)), "rollout.engine: vllm-server, on other machines"
    )
    return (
        f"train.strategy: {strategy} with rollout.engine: local gathers the whole policy on every rank to sample, "
        f"{needed / 1e9:.1f} GB of {machine.memory_bytes / 1e9:.1f} GB; sample by vLLM: {change}"
    )


def _shared_engines(subject: Subject, machine: Machine) -> Iterator[tuple[str, Subject]]:
    """vLLM over ever more ranks of a machine, each time with the least memory that holds some rows at once."""
    if not isinstance(subject.recipe, GrpoRecipe) or machine.device is None:
        return
    if subject.recipe.rollout.engine == "vllm-server":
        return
    for ranks in (1, 2, 4, 8):
        if ranks > machine.device.per_machine or machine.ranks % ranks:
            continue
        for tenths in range(1, 10):
            options = {"tensor_parallel": ranks, "gpu_memory_utilization": tenths / 10}
            changed = _changed(subject, rollout={"engine": "vllm", "vllm": options})
            rollout = changed.rollout(machine)
            assert rollout is not None
            if cached_rows(changed.recipe, changed.sizes, rollout) >= ENOUGH_ROWS:
                words = ", ".join(f"rollout.vllm.{key}: {value}" for key, value in options.items())
                yield f"rollout.engine: vllm, {words}", changed
                break


def _offloaded(subject: Subject, measured: Measured, machine: Machine) -> str | None:
    zero = {"stage": 3, "offload_parameters": True, "offload_optimizer": True}
    changed = _changed(subject, train={"strategy": "deepspeed", "deepspeed": zero})
    if strategy_problems(changed.recipe, "deepspeed"):
        return None
    if text := _fitting(changed, measured, machine, ["deepspeed"]):
        return _joined(text, "train.deepspeed.offload_parameters: true, train.deepspeed.offload_optimizer: true")
    return None


def _fitting(subject: Subject, measured: Measured, machine: Machine, names: Sequence[str]) -> str | None:
    """What to write so that one of the strategies fits, smaller microbatches included."""
    for name in names:
        found = option(subject, measured, machine, name, subject.recipe.learner.max_tokens_per_microbatch)
        if found.fits:
            return f"train.strategy: {name}"
    if text := _smaller(subject, measured, machine, names):
        return text
    return None


def _smaller(subject: Subject, measured: Measured, machine: Machine, names: Sequence[str]) -> str | None:
    tokens = subject.recipe.learner.max_tokens_per_microbatch
    found = [(option(subject, measured, machine, name, tokens).largest_tokens, name) for name in names]
    usable = [(count, name) for count, name in found if 0 < count < tokens]
    if not usable:
        return None
    count, name = max(usable, key=lambda entry: entry[0])
    count = max(subject.smallest_tokens, count * MARGIN // 16)
    return f"train.strategy: {name}, learner.max_tokens_per_microbatch: {count}"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _changed(subject: Subject, **sections: Mapping[str, Any]) -> Subject:
    tree = subject.recipe.model_dump()
    for section, values in sections.items():
        tree[section] |= values
    return replace(subject, recipe=type(subject.recipe).model_validate(tree))

"""Check what depends on more than one key. The rules refuse; they never fill in a value."""

import re
from collections.abc import Callable, Mapping

from tiercel.config.conflicts.algorithm import ALGORITHM_RULES
from tiercel.config.conflicts.compiling import compile_obstacle
from tiercel.config.conflicts.offline import OFFLINE_RULES, distill, dropout, teacher, template_problems
from tiercel.config.conflicts.rewards import reward_entries, reward_names, turns
from tiercel.config.conflicts.sampling import branches, vllm_options
from tiercel.config.conflicts.table import conflict
from tiercel.config.data import HeldOut
from tiercel.config.engines import ENGINE_KINDS, EngineKind
from tiercel.config.schema import BaseRecipe, DpoRecipe, GrpoRecipe, KtoRecipe, OfflineRecipe, Purpose
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.config.suggestions import nearest_word
from tiercel.config.trained_parts import PARTS, adapted_parts, keeps_start, whole_parts
from tiercel.config_base import Keys, Problem, Problems, Section, address_fault, regex_fault, shown

EVALUATED: dict[Purpose, tuple[str, ...]] = {
    "sft": ("eval/loss",),
    "pairs": ("eval/loss", "eval/accuracy"),
    "labels": ("eval/loss",),
    "grpo": ("eval/accuracy", "eval/reward/mean"),
}
TARGET_WORDS = ("language", "vision", "projector", "all")


def rule_problems(recipe: BaseRecipe) -> list[Problem]:
    """List what all rules refuse in a recipe that the schema allows, in the order of its sections. Reads no file. A
    recipe calls it when it is made; call it yourself for a recipe that was copied with other values."""
    problems = [problem for rule in COMMON_RULES for problem in rule(recipe)]
    if isinstance(recipe, GrpoRecipe):
        problems += [problem for rule in GRPO_RULES for problem in rule(recipe)]
    if isinstance(recipe, OfflineRecipe):
        problems += [problem for rule in OFFLINE_RULES for problem in rule(recipe)]
    return problems


def _rows(recipe: BaseRecipe) -> Problems:
    data = recipe.data
    held = data.eval
    if isinstance(held, HeldOut) and (held.fraction is None) == (held.count is None):
        given = "has both fraction and count" if held.count is not None else "has neither fraction nor count"
        yield conflict("eval", given)
    if data.rows_per_prefix is not None and not data.group_by_prefix:
        yield conflict("rows_per_prefix", data.rows_per_prefix)
    elif data.group_by_prefix and data.mix:
        yield conflict("group_by_prefix and mix")
    yield from template_problems("data.prompt", data.prompt)
    if data.train_turns != "all" and isinstance(recipe, GrpoRecipe):
        yield conflict("train_turns of completions", data.train_turns, recipe.kind)
    elif data.train_turns != "all" and recipe.purpose != "sft":
        yield conflict("train_turns of answers", data.train_turns, recipe.kind)


def _model(recipe: BaseRecipe) -> Problems:
    """Require that quantised weights are not trained, and a frozen tower and projector for the cache, because features
    are taken after the projector."""
    model = recipe.model
    low, high = model.min_pixels, model.max_pixels
    if low is not None and high is not None and low > high:
        yield conflict("min_pixels", low, high)
    if model.vision_cache_bytes and (changing := _what_trains_vision(recipe)):
        yield conflict("vision_cache_bytes", model.vision_cache_bytes, changing)
    if model.quantize is not None and recipe.lora is None:
        yield conflict("quantize and lora", model.quantize)


def _what_trains_vision(recipe: BaseRecipe) -> str | None:
    """Return the key and value that make the tower or the projector change, as far as the recipe alone can tell."""
    if recipe.lora is not None and {"vision", "projector"} & set(adapted_parts(recipe) or ()):
        return f"lora.targets {recipe.lora.targets}"
    return f"freeze {shown(list(recipe.freeze))}" if {"vision", "projector"} & set(whole_parts(recipe)) else None


def _start_of_adapter(recipe: BaseRecipe) -> Problems:
    lora = recipe.lora
    if lora is None or lora.start is None:
        return
    if recipe.model.quantize is None:
        yield conflict("start and quantize", lora.start)
    if lora.init is not None:
        yield conflict("start and init", lora.start)
    if lora.kind == "dora":
        yield conflict("start and kind", lora.start)
    if isinstance(recipe, GrpoRecipe) and not recipe.rollout.engine_kind.shares_weights:
        yield conflict("start and engine", lora.start)


def _trained_parts(recipe: BaseRecipe) -> Problems:
    """Require that something is trained, that a part is trained by an adapter or whole, not both, and that a learning
    rate is that of a trained part."""
    adapted, whole = adapted_parts(recipe), whole_parts(recipe)
    if adapted is None:  # it depends on the model
        return
    if recipe.lora is not None and (both := [part for part in whole if part in adapted]):
        yield conflict("freeze and targets", shown(list(recipe.freeze)), recipe.lora.targets, " and ".join(both))
    for part in PARTS:
        rate = getattr(recipe.optim.part_lr, part)
        if rate is not None and part not in (*adapted, *whole):
            yield conflict("part_lr without a trained part", part, rate)
    if recipe.lora is None and not whole:
        yield conflict("freeze and lora")


def _reference_place(recipe: BaseRecipe) -> Problems:
    place = recipe.model.reference
    if place == "device" or keeps_start(recipe):
        return
    if isinstance(recipe, GrpoRecipe):
        yield conflict("reference without a penalty", place, recipe.kind)
    elif isinstance(recipe, DpoRecipe):
        yield conflict("reference of pairs", place)
    elif isinstance(recipe, KtoRecipe):
        yield conflict("reference of labels", place)
    else:
        yield conflict("no reference", place, recipe.kind)


def _lora_targets(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None or recipe.lora.targets in TARGET_WORDS:
        return
    targets = recipe.lora.targets
    words = ", ".join(TARGET_WORDS)
    is_expression = re.search(r"[\\.+?()\[\]|^$]", targets) is not None
    meant = None if is_expression else nearest_word("lora.targets", targets, TARGET_WORDS).key
    if meant is not None:
        yield conflict("a word for targets", shown(targets), words, meant)
    elif (fault := regex_fault(targets)) is not None:
        yield conflict("a pattern for targets", shown(targets), words, fault)


def _run_length(recipe: BaseRecipe) -> Problems:
    train, optim = recipe.train, recipe.optim
    if train.steps is None and train.epochs is None:
        yield conflict("no length")
    if train.steps is not None and train.epochs is not None:
        yield conflict("two lengths", train.steps, train.epochs)
    if train.steps is not None and optim.warmup_steps > train.steps:
        yield conflict("warmup_steps", optim.warmup_steps, train.steps)
    if optim.min_lr > 0 and (optim.schedule == "constant" or optim.min_lr > optim.lr):
        why = "a constant learning rate does not fall" if optim.schedule == "constant" else f"optim.lr is {optim.lr:g}"
        yield conflict("min_lr", optim.min_lr, why)
    if optim.decay_steps is not None and optim.schedule != "wsd":
        yield conflict("decay_steps", optim.decay_steps)
    if train.profile is not None and train.steps is not None and (last := max(train.profile.steps)) > train.steps:
        yield conflict("steps and steps", last, train.steps)
    if train.keep_best is not None and recipe.data.eval is None:
        yield conflict("keep_best and eval", train.keep_best)
    elif train.keep_best is not None and train.keep_best not in EVALUATED[recipe.purpose]:
        yield conflict("keep_best", train.keep_best, " or ".join(EVALUATED[recipe.purpose]))
    if train.eval_every is not None and recipe.data.eval is None:
        yield conflict("eval_every", train.eval_every)


def _completions(recipe: GrpoRecipe) -> Problems:
    rollout, prompt, budget = recipe.rollout, recipe.data.max_prompt_tokens, recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and (needed := recipe.smallest_microbatch(prompt)) > budget:
        yield conflict("a prompt and one completion", rollout.longest_key, budget, prompt, rollout.longest, needed)
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield conflict("min_new_tokens", rollout.min_new_tokens, rollout.max_new_tokens)
    if "" in rollout.stop:
        yield conflict("stop")


def _keys_of_others(
    path: str, section: Section, choice: str, kinds: Mapping[str, EngineKind] | Mapping[str, StrategyKind]
) -> Problems:
    """Refuse keys of a section that the engine or strategy named by its key `choice` does not read, but another one
    does."""
    chosen = getattr(section, choice)
    own = kinds[chosen].own_keys if chosen in kinds else ()
    others = dict.fromkeys(key for kind in kinds.values() for key in kind.own_keys if key not in own)
    for key in section.changed(*others):
        readers = " or ".join(kind.name for kind in kinds.values() if key in kind.own_keys)
        yield conflict("key of another engine or strategy", path, key, choice, chosen, readers)


def _engine(recipe: GrpoRecipe) -> Problems:
    rollout, engine, lora, quantize = recipe.rollout, recipe.rollout.engine_kind, recipe.lora, recipe.model.quantize
    yield from _keys_of_others("rollout", rollout, "engine", ENGINE_KINDS)
    for key, remedy in engine.required_keys.items():
        if not getattr(rollout, key):
            yield conflict("key that the engine requires", key, remedy)
    for index, url in enumerate(rollout.urls):
        if (fault := address_fault(url)) is not None:
            yield conflict("address in urls", index, fault)
    if rollout.lookahead and not engine.samples_ahead:
        able = " or ".join(each.name for each in ENGINE_KINDS.values() if each.samples_ahead)
        yield conflict("lookahead and engine", rollout.lookahead, engine.name, able)
    if rollout.lookahead > rollout.max_staleness:
        yield conflict("lookahead and max_staleness", rollout.lookahead, rollout.max_staleness)
    if rollout.lookahead > 1 and lora is None:
        yield conflict("lookahead and lora", rollout.lookahead)
    if engine.is_beside and lora is None and rollout.vllm.sleep_level == 2:
        yield conflict("sleep_level")
    if engine.shares_weights:
        return
    if lora is not None and whole_parts(recipe):
        yield conflict("engine", engine.name, shown(list(recipe.freeze)), engine.title)
    if lora is not None and lora.kind == "dora":
        yield conflict("kind and engine", engine.name)
    if quantize is not None and recipe.algorithm.correction.level == "none":
        yield conflict("level and quantize", quantize, engine.name)


def _strategy(recipe: BaseRecipe) -> Problems:
    """Refuse keys that the strategy does not read, and what it cannot compute or divide between ranks."""
    yield from _keys_of_others("train", recipe.train, "strategy", STRATEGY_KINDS)
    kind, zero, lora, together = (
        recipe.train.strategy_kind,
        recipe.train.deepspeed,
        recipe.lora,
        recipe.train.context_parallel,
    )
    if together > 1 and recipe.learner.form in ("split", "repeated"):
        yield conflict("context_parallel and form", together, recipe.learner.form)
    if kind is None:
        return
    if together > 1 and kind.is_alone:
        yield conflict("context_parallel and strategy", together, kind.name)
    if recipe.model.quantize is not None and kind.shards_model:
        yield conflict("quantize and strategy", recipe.model.quantize, kind.name)
    if lora is not None and lora.kind == "dora" and kind.shards_model:
        yield conflict("kind and strategy", kind.name)
    if "deepspeed" in kind.own_keys and zero.stage == 2 and zero.offload_parameters:
        yield conflict("offload_parameters")
    if recipe.reliability.max_skipped_updates and not kind.skips_updates:
        yield conflict("max_skipped_updates", recipe.reliability.max_skipped_updates, kind.name)
    divides_trained = kind.divides_trained(has_adapters=lora is not None)
    if recipe.model.dtype == "float16" and divides_trained:
        yield conflict("dtype", kind.name)
    if not recipe.optim.is_of_torch and divides_trained:
        yield conflict("sharded bitsandbytes", recipe.optim.name, kind.name)
    if recipe.optim.name == "muon" and kind.shards_model:
        yield conflict("sharded muon", kind.name)
    if (changing := _what_trains_vision(recipe)) and not kind.trains_vision:
        yield conflict("ZeRO and vision", kind.name, changing)


def _muon(recipe: BaseRecipe) -> Problems:
    """Refuse Muon if its step is not a step of a weight, and its key if it is not used."""
    if recipe.optim.name == "muon" and recipe.lora is not None:
        yield conflict("name and lora")
    if recipe.optim.name != "muon" and recipe.optim.changed("momentum"):
        yield conflict("momentum", recipe.optim.momentum, recipe.optim.name)


def _compile(recipe: BaseRecipe) -> Problems:
    obstacle = compile_obstacle(recipe, recipe.train.strategy_kind)
    if recipe.learner.compile is True and obstacle is not None:
        yield Keys("learner.compile", obstacle.key).problem(f"is true, but does not work with {obstacle}")


def _trackers(recipe: BaseRecipe) -> Problems:
    for index, name in enumerate(recipe.trackers):
        if name in recipe.trackers[:index]:
            yield conflict("tracker twice", index, name)


COMMON_RULES: tuple[Callable[[BaseRecipe], Problems], ...] = (
    _model,
    _rows,
    _start_of_adapter,
    _lora_targets,
    _trained_parts,
    _reference_place,
    _run_length,
    _strategy,
    _muon,
    _compile,
    _trackers,
)
GRPO_RULES: tuple[Callable[[GrpoRecipe], Problems], ...] = (
    _completions,
    _engine,
    vllm_options,
    *ALGORITHM_RULES,
    dropout,
    reward_entries,
    reward_names,
    turns,
    branches,
    teacher,
    distill,
)
BaseRecipe.judge = rule_problems

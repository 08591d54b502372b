"""Check what depends on more than one key. The rules refuse; they never fill in a value."""

import re
from collections.abc import Callable, Mapping

from tiercel.config.conflicts.algorithm import ALGORITHM_RULES
from tiercel.config.conflicts.branches import branches
from tiercel.config.conflicts.compiling import compile_obstacle
from tiercel.config.conflicts.offline import OFFLINE_RULES, distill, dropout, grouped_rows, teacher, template_problems
from tiercel.config.conflicts.rewards import reward_entries, reward_names, turns
from tiercel.config.conflicts.vllm_options import vllm_options
from tiercel.config.data import HeldOut
from tiercel.config.engines import ENGINE_KINDS, EngineKind
from tiercel.config.parts import PARTS, adapted_parts, keeps_start, whole_parts
from tiercel.config.schema import BaseRecipe, GrpoRecipe, Kind, OfflineRecipe, Purpose
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.config.suggestions import nearest_word
from tiercel.config_base import Keys, Problem, Problems, Section, address_fault, regex_fault, shown

EVALUATED: dict[Purpose, tuple[str, ...]] = {
    "sft": ("eval/loss",),
    "pairs": ("eval/loss", "eval/accuracy"),
    "labels": ("eval/loss",),
    "grpo": ("eval/accuracy", "eval/reward/mean"),
}
# For each command that compares with a reference: the condition under which it keeps a copy of the start, and the keys
# that decide it.
_KL = ("an algorithm.kl.coef above 0 and ", ("algorithm.kl.coef", "lora", "freeze"))
COMPARES: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "grpo": _KL,
    "distill": _KL,
    "dpo": (
        "a dpo.loss with a reference, dpo.precompute_reference: false and ",
        ("dpo.loss", "dpo.precompute_reference", "lora", "freeze"),
    ),
    "kto": ("", ("lora", "freeze")),
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


def _pixels(recipe: BaseRecipe) -> Problems:
    low, high = recipe.model.min_pixels, recipe.model.max_pixels
    if low is not None and high is not None and low > high:
        yield Keys("model.min_pixels", "model.max_pixels").problem(
            f"is {low}, but model.max_pixels is only {high}, so no image can satisfy both; lower one or raise the other"
        )


def _held_out(recipe: BaseRecipe) -> Problems:
    held = recipe.data.eval
    if isinstance(held, HeldOut) and (held.fraction is None) == (held.count is None):
        given = "has both fraction and count" if held.count is not None else "has neither fraction nor count"
        yield Keys("data.eval").problem(
            f"{given}, but must have exactly one of them; use {{fraction: 0.01}} or {{count: 100}}"
        )


def _learnt_turns(recipe: GrpoRecipe) -> Problems:
    if recipe.data.train_turns != "all":
        yield Keys("data.train_turns").problem(
            f"is {recipe.data.train_turns}, but `tiercel {recipe.kind}` trains on completions; remove this key"
        )


def _vision_cache(recipe: BaseRecipe) -> Problems:
    """Require a frozen tower and projector for the cache, because features are taken after the projector."""
    given = recipe.model.vision_cache_bytes
    changing = _what_trains_vision(recipe)
    if given > 0 and changing:
        yield Keys("model.vision_cache_bytes", "lora", "freeze").problem(
            f"is {given}, but with {changing}, the cached features would be those of an older vision tower or "
            "projector; use 0, or train only the language model"
        )


def _what_trains_vision(recipe: BaseRecipe) -> str | None:
    """Return the key and value that make the tower or the projector change, as far as the recipe alone can tell."""
    if recipe.lora is not None and {"vision", "projector"} & set(adapted_parts(recipe) or ()):
        return f"lora.targets {recipe.lora.targets}"
    return f"freeze {shown(list(recipe.freeze))}" if {"vision", "projector"} & set(whole_parts(recipe)) else None


def _quantized(recipe: BaseRecipe) -> Problems:
    """Require that quantised weights are not trained, and that each rank holds all of them."""
    kind, strategy = recipe.model.quantize, recipe.train.strategy_kind
    if kind is None:
        return
    if recipe.lora is None:
        yield Keys("model.quantize", "lora").problem(
            f"is {kind}, but there is no section lora, and quantised weights cannot be trained; add the section "
            "lora, or remove this key"
        )
    if strategy is not None and strategy.shards_model:
        yield Keys("model.quantize", "train.strategy").problem(
            f"is {kind}, but train.strategy {strategy.name} cannot shard quantised weights over ranks; set "
            "train.strategy: ddp, or remove this key"
        )
    if isinstance(recipe, GrpoRecipe) and not recipe.rollout.engine_kind.shares_weights:
        engine = recipe.rollout.engine_kind.name
        if recipe.algorithm.correction.level == "none":
            yield Keys("algorithm.correction.level", "model.quantize", "rollout.engine").problem(
                f"is none, but model.quantize is {kind}, and rollout.engine {engine} samples from the checkpoint's "
                "own weights; use token or sequence, or set rollout.engine: local"
            )


def _adapter_kind(recipe: BaseRecipe) -> Problems:
    """Allow DoRA and LoftQ only where they are applied exactly: in the trainer's own model, held whole by each rank."""
    lora, strategy = recipe.lora, recipe.train.strategy_kind
    if lora is None:
        return
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    if lora.kind == "dora" and engine is not None and not engine.shares_weights:
        yield Keys("lora.kind", "rollout.engine").problem(
            f"is dora, but rollout.engine {engine.name} does not accept such adapters; use rslora, or set "
            "rollout.engine: local"
        )
    if lora.kind == "dora" and strategy is not None and strategy.shards_model:
        yield Keys("lora.kind", "train.strategy").problem(
            f"is dora, but with train.strategy {strategy.name}, each rank holds only a part of the weights whose "
            "norms it needs; use rslora, or set train.strategy: ddp"
        )
    if lora.start is None:
        return
    for key, stands, given, remedy in (
        ("model.quantize", recipe.model.quantize is None, "model.quantize is not set", "set model.quantize: nf4"),
        ("lora.init", lora.init is not None, "lora.init starts from another adapter", "remove lora.init"),
        ("lora.kind", lora.kind == "dora", "lora.kind is dora", "set lora.kind: lora or rslora"),
        (
            "rollout.engine",
            engine is not None and not engine.shares_weights,
            "this engine uses the checkpoint's own weights, which were not quantised",
            "set rollout.engine: local",
        ),
    ):
        if stands:
            text = f"is {lora.start}, but {given}; {remedy}, or set lora.start: null"
            yield Keys("lora.start", key).problem(text)


def _frozen_parts(recipe: BaseRecipe) -> Problems:
    """Require that a part is trained either by an adapter or whole, not both."""
    if recipe.lora is None:
        return
    if both := [part for part in whole_parts(recipe) if part in (adapted_parts(recipe) or ())]:
        parts = " and ".join(both)
        yield Keys("freeze", "lora.targets").problem(
            f"is {shown(list(recipe.freeze))}, but lora.targets {recipe.lora.targets} adapts {parts}; add {parts} to "
            "freeze, because an adapter does not change a part's own weights, or take it out of lora.targets"
        )


def _part_rates(recipe: BaseRecipe) -> Problems:
    adapted = adapted_parts(recipe)
    if adapted is None:  # it depends on the model
        return
    for part in PARTS:
        rate = getattr(recipe.optim.part_lr, part)
        if rate is not None and part not in (*adapted, *whole_parts(recipe)):
            yield Keys(f"optim.part_lr.{part}", "freeze", "lora.targets", "lora").problem(
                f"is {rate:g}, but no part of {part} is trained; remove this key, or train {part}: take it out of "
                "freeze, or add it to lora.targets"
            )


def _reference_place(recipe: BaseRecipe) -> Problems:
    if recipe.model.reference == "device" or keeps_start(recipe):
        return
    condition, keys = COMPARES.get(recipe.kind, (None, ()))
    reason = "does not use a reference"
    if condition is not None:
        reason = f"keeps no copy of the initial weights, because that requires {condition}a part that is trained whole"
    yield Keys("model.reference", *keys).problem(
        f"is {recipe.model.reference}, but `tiercel {recipe.kind}` {reason}; remove this key"
    )


def _lora_targets(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None or recipe.lora.targets in TARGET_WORDS:
        return
    targets = recipe.lora.targets
    words = ", ".join(TARGET_WORDS)
    is_expression = re.search(r"[\\.+?()\[\]|^$]", targets) is not None
    meant = None if is_expression else nearest_word("lora.targets", targets, TARGET_WORDS).key
    if meant is not None:
        yield Keys("lora.targets").problem(f"is {shown(targets)}, but the possible words are {words}; use {meant}")
    elif (fault := regex_fault(targets)) is not None:
        yield Keys("lora.targets").problem(
            f"is {shown(targets)}, but must be {words}, or a regular expression for module names ({fault})"
        )


def _something_to_train(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None and set(recipe.freeze) == {"vision", "projector", "language"}:
        yield Keys("freeze", "lora").problem(
            "names all three parts, and there is no section lora, so nothing is trained; take a part out of freeze, "
            "or add the section lora"
        )


def _run_length(recipe: BaseRecipe) -> Problems:
    train, optim = recipe.train, recipe.optim
    if train.steps is None and train.epochs is None:
        yield Keys("train.steps", "train.epochs").problem("is not set, and neither is train.epochs; set one of them")
    if train.steps is not None and train.epochs is not None:
        yield Keys("train.steps", "train.epochs").problem(
            f"is {train.steps}, but train.epochs is set too ({train.epochs:g}); remove one of them"
        )
    if train.steps is not None and optim.warmup_steps > train.steps:
        yield Keys("optim.warmup_steps", "train.steps").problem(
            f"is {optim.warmup_steps}, but train.steps is only {train.steps}, so optim.lr would never be reached; "
            "use fewer warmup steps"
        )
    if optim.min_lr > 0 and (optim.schedule == "constant" or optim.min_lr > optim.lr):
        why = "a constant learning rate does not fall" if optim.schedule == "constant" else f"optim.lr is {optim.lr:g}"
        yield Keys("optim.min_lr", "optim.schedule", "optim.lr").problem(
            f"is {optim.min_lr:g}, but {why}; use a rate below optim.lr, and set optim.schedule: cosine, linear or wsd"
        )
    if optim.decay_steps is not None and optim.schedule != "wsd":
        yield Keys("optim.decay_steps", "optim.schedule").problem(
            f"is {optim.decay_steps}, but only optim.schedule: wsd has a decay of its own; remove this key"
        )
    if train.profile is not None and train.steps is not None and (last := max(train.profile.steps)) > train.steps:
        yield Keys("train.profile.steps", "train.steps").problem(
            f"contains step {last}, but the run has only {train.steps}; use steps from 1 to {train.steps}"
        )
    if train.keep_best is not None:
        yield from _keep_best(recipe, train.keep_best)
    if train.eval_every is not None and recipe.data.eval is None:
        yield Keys("train.eval_every", "data.eval").problem(
            f"is {train.eval_every}, but there are no rows to evaluate on; set data.eval, or remove this key"
        )


def _completion_fits_microbatch(recipe: GrpoRecipe) -> Problems:
    prompt, completion = recipe.data.max_prompt_tokens, recipe.rollout.longest
    key = "rollout.max_trajectory_tokens" if recipe.rollout.has_turns else "rollout.max_new_tokens"
    budget = recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and (needed := recipe.smallest_microbatch(prompt)) > budget:
        yield Keys("learner.max_tokens_per_microbatch", "data.max_prompt_tokens", key).problem(
            f"is {budget}, but must hold a prompt and one completion: data.max_prompt_tokens ({prompt}) + {key} "
            f"({completion}) = {needed}"
        )


def _completion_length(recipe: GrpoRecipe) -> Problems:
    low, high = recipe.rollout.min_new_tokens, recipe.rollout.max_new_tokens
    if low > high:
        yield Keys("rollout.min_new_tokens", "rollout.max_new_tokens").problem(
            f"is {low}, but rollout.max_new_tokens is only {high}, so no completion can satisfy both; lower one or "
            "raise the other"
        )


def _stop_strings(recipe: GrpoRecipe) -> Problems:
    if "" in recipe.rollout.stop:
        yield Keys("rollout.stop").problem(
            'contains "", which every text contains, so no completion could be sampled; remove it'
        )


def _keys_of_others(
    path: str, section: Section, choice: str, kinds: Mapping[str, EngineKind] | Mapping[str, StrategyKind]
) -> Problems:
    """Refuse keys of a section that the engine or strategy named by its key `choice` does not read, but another one
    does."""
    chosen = getattr(section, choice)
    own = kinds[chosen].own_keys if chosen in kinds else ()
    for key in dict.fromkeys(key for kind in kinds.values() for key in kind.own_keys if key not in own):
        if getattr(section, key) != type(section).model_fields[key].default:
            readers = " or ".join(kind.name for kind in kinds.values() if key in kind.own_keys)
            yield Keys(f"{path}.{key}", f"{path}.{choice}").problem(
                f"is set, but {path}.{choice} {chosen} does not use it; set {path}.{choice}: {readers}, or remove "
                "this key"
            )


def _engine_keys(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    yield from _keys_of_others("rollout", rollout, "engine", ENGINE_KINDS)
    for key, remedy in rollout.engine_kind.required_keys.items():
        if not getattr(rollout, key):
            yield Keys(f"rollout.{key}", "rollout.engine").problem(f"is required; {remedy}")
    for index, url in enumerate(rollout.urls):
        if (fault := address_fault(url)) is not None:
            yield Keys(f"rollout.urls.{index}").problem(f"{fault}; use an address such as http://127.0.0.1:8000")


def _engine(recipe: GrpoRecipe) -> Problems:
    rollout, engine = recipe.rollout, recipe.rollout.engine_kind
    if rollout.lookahead and not engine.samples_ahead:
        able = " or ".join(each.name for each in ENGINE_KINDS.values() if each.samples_ahead)
        yield Keys("rollout.lookahead", "rollout.engine").problem(
            f"is {rollout.lookahead}, but rollout.engine {engine.name} has no devices of its own to sample on while "
            f"the learner works; use 0, or set rollout.engine: {able}"
        )
    if rollout.lookahead > rollout.max_staleness:
        yield Keys("rollout.lookahead", "rollout.max_staleness").problem(
            f"is {rollout.lookahead}, but rollout.max_staleness is only {rollout.max_staleness}, and completions "
            f"would be {rollout.lookahead} versions old; set rollout.max_staleness: {rollout.lookahead}, or use a "
            "lower value"
        )
    if rollout.lookahead > 1 and recipe.lora is None:
        yield Keys("rollout.lookahead", "lora").problem(
            f"is {rollout.lookahead}, but without lora, a server's new weights would replace those that it is still "
            "sampling from; use 1, or add the section lora, so that versions are kept side by side"
        )
    if engine.is_beside and recipe.lora is None and rollout.vllm.sleep_level == 2:
        yield Keys("rollout.vllm.sleep_level", "lora").problem(
            "is 2, but without lora, the engine would then load the checkpoint's weights instead of the policy's; "
            "use 1, or add the section lora"
        )
    if not engine.shares_weights and recipe.lora is not None and whole_parts(recipe):
        yield Keys("rollout.engine", "freeze").problem(
            f"is {engine.name}, but lora is set and freeze is {shown(list(recipe.freeze))}, and {engine.title} would "
            "not receive the parts that are trained whole beside an adapter; set freeze: [vision, projector], with "
            "lora.targets: all to adapt them, or rollout.engine: local"
        )


def _keep_best(recipe: BaseRecipe, metric: str) -> Problems:
    if recipe.data.eval is None:
        yield Keys("train.keep_best", "data.eval").problem(
            f"is {metric}, but there are no rows to evaluate on; set data.eval, or remove this key"
        )
    elif metric not in EVALUATED[recipe.purpose]:
        metrics = " or ".join(EVALUATED[recipe.purpose])
        yield Keys("train.keep_best").problem(
            f"is {metric}, but these evaluations do not have this metric; use {metrics}"
        )


def _context(recipe: BaseRecipe) -> Problems:
    """Check what ranks need in order to compute a microbatch together."""
    size, strategy, form = recipe.train.context_parallel, recipe.train.strategy_kind, recipe.learner.form
    if size == 1:
        return
    if strategy is not None and strategy.is_alone:
        yield Keys("train.context_parallel", "train.strategy").problem(
            f"is {size}, but train.strategy {strategy.name} has only one rank; set train.strategy: auto, or remove "
            "this key"
        )
    if form in ("split", "repeated"):
        yield Keys("train.context_parallel", "learner.form").problem(
            f"is {size}, but ranks cannot compute learner.form {form} together; set learner.form: auto"
        )


def _strategy(recipe: BaseRecipe) -> Problems:
    yield from _keys_of_others("train", recipe.train, "strategy", STRATEGY_KINDS)
    kind = recipe.train.strategy_kind
    if kind is None:
        return
    zero = recipe.train.deepspeed
    if "deepspeed" in kind.own_keys and zero.stage == 2 and zero.offload_parameters:
        yield Keys("train.deepspeed.offload_parameters", "train.deepspeed.stage").problem(
            "is true, but train.deepspeed.stage is 2, which keeps whole weights on every rank; set "
            "train.deepspeed.stage: 3, or use false"
        )
    if recipe.model.dtype == "float16" and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Keys("model.dtype", "train.strategy").problem(
            f"is float16, but with train.strategy {kind.name}, each rank sees only a part of the gradient, so ranks "
            "could disagree about an overflow; use bfloat16 or float32, or set train.strategy: ddp"
        )
    if recipe.reliability.max_skipped_updates and not kind.skips_updates:
        yield Keys("reliability.max_skipped_updates", "train.strategy").problem(
            f"is {recipe.reliability.max_skipped_updates}, but train.strategy {kind.name} keeps the gradients of a "
            "skipped update; use 0, or set train.strategy: fsdp2"
        )
    if not recipe.optim.is_of_torch and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Keys("optim.name", "train.strategy").problem(
            f"is {recipe.optim.name}, but with train.strategy {kind.name}, each rank holds only a part of the "
            "optimiser's moments, which bitsandbytes cannot shard; use adamw, or set train.strategy: ddp"
        )
    if recipe.optim.name == "muon" and kind.shards_model:
        yield Keys("optim.name", "train.strategy").problem(
            f"is muon, but with train.strategy {kind.name}, each rank holds only a part of each weight, and Muon's "
            "step follows from the whole matrix; use adamw, or set train.strategy: ddp"
        )
    if (changing := _what_trains_vision(recipe)) and not kind.trains_vision:
        yield Keys("train.strategy", "lora", "freeze").problem(
            f"is {kind.name}, but with {changing}, ZeRO would wait for every rank at each picture, and a step in "
            "which ranks have different numbers of pictures would hang; use fsdp2, or train only the language model"
        )


def _muon(recipe: BaseRecipe) -> Problems:
    """Refuse Muon if its step is not a step of a weight, and its key if it is not used."""
    if recipe.optim.name == "muon" and recipe.lora is not None:
        yield Keys("optim.name", "lora").problem(
            "is muon, but a step for each of LoRA's two factors is not the step that their product would take; use "
            "adamw, or remove lora"
        )
    momentum = recipe.optim.momentum
    if recipe.optim.name != "muon" and momentum != type(recipe.optim).model_fields["momentum"].default:
        yield Keys("optim.momentum", "optim.name").problem(
            f"is {momentum:g}, but optim.name {recipe.optim.name} does not use it; set optim.betas, or set optim.name: "
            "muon"
        )


def _compile(recipe: BaseRecipe) -> Problems:
    obstacle = compile_obstacle(recipe, recipe.train.strategy_kind)
    if recipe.learner.compile is True and obstacle is not None:
        yield Keys("learner.compile", obstacle.key).problem(f"is true, but does not work with {obstacle}")


def _trackers(recipe: BaseRecipe) -> Problems:
    for index, name in enumerate(recipe.trackers):
        if name in recipe.trackers[:index]:
            yield Keys(f"trackers.{index}").problem(f"is {name}, which is already in the list; remove one of the two")


COMMON_RULES: tuple[Callable[[BaseRecipe], Problems], ...] = (
    _pixels,
    _held_out,
    grouped_rows,
    lambda recipe: template_problems("data.prompt", recipe.data.prompt),
    _vision_cache,
    _quantized,
    _adapter_kind,
    _lora_targets,
    _frozen_parts,
    _part_rates,
    _reference_place,
    _something_to_train,
    _run_length,
    _strategy,
    _muon,
    _context,
    _compile,
    _trackers,
)
GRPO_RULES: tuple[Callable[[GrpoRecipe], Problems], ...] = (
    _learnt_turns,
    _completion_fits_microbatch,
    _completion_length,
    _stop_strings,
    _engine_keys,
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

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
from tiercel.sections import Keys, Problem, Problems, Section, address_fault, regex_fault, shown

EVALUATED: dict[Purpose, tuple[str, ...]] = {
    "sft": ("eval/loss",),
    "pairs": ("eval/loss", "eval/accuracy"),
    "labels": ("eval/loss",),
    "grpo": ("eval/accuracy", "eval/reward/mean"),
}
# For each command that compares with a reference: the condition under which it keeps a copy of the start, and the keys
# that decide it.
_KL = ("algorithm.kl.coef above 0 and ", ("algorithm.kl.coef", "lora", "freeze"))
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
            f"{low} given, above model.max_pixels ({high}); no image can satisfy both"
        )


def _held_out(recipe: BaseRecipe) -> Problems:
    held = recipe.data.eval
    if isinstance(held, HeldOut) and (held.fraction is None) == (held.count is None):
        given = "both fraction and count are" if held.count is not None else "neither fraction nor count is"
        yield Keys("data.eval").problem(f"{given} given; write {{fraction: 0.01}} or {{count: 100}}")


def _learnt_turns(recipe: GrpoRecipe) -> Problems:
    if recipe.data.train_turns != "all":
        yield Keys("data.train_turns").problem(
            f"{recipe.data.train_turns} given, but `tiercel {recipe.kind}` learns completions; remove it"
        )


def _vision_cache(recipe: BaseRecipe) -> Problems:
    """Require a frozen tower and projector for the cache, because features are taken after the projector."""
    given = recipe.model.vision_cache_bytes
    changing = _what_trains_vision(recipe)
    if given > 0 and changing:
        yield Keys("model.vision_cache_bytes", "lora", "freeze").problem(
            f"{given} given with {changing}; kept features would be those of an older vision tower or projector; "
            "write model.vision_cache_bytes: 0, or train the language model only"
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
            f"{kind} given without lora, but quantised weights cannot be trained; add the section lora, or remove it"
        )
    if strategy is not None and strategy.shards_model:
        yield Keys("model.quantize", "train.strategy").problem(
            f"{kind} given with train.strategy {strategy.name}, which cannot share quantised weights over ranks; "
            "write train.strategy: ddp, or remove it"
        )
    if isinstance(recipe, GrpoRecipe) and not recipe.rollout.engine_kind.shares_weights:
        engine = recipe.rollout.engine_kind.name
        if recipe.algorithm.correction.level == "none":
            yield Keys("algorithm.correction.level", "model.quantize", "rollout.engine").problem(
                f"none given with model.quantize {kind} and rollout.engine {engine}, which samples from the "
                "checkpoint's own weights; write token or sequence, or rollout.engine: local"
            )


def _adapter_kind(recipe: BaseRecipe) -> Problems:
    """Allow DoRA and LoftQ only where they are applied exactly: in the trainer's own model, held whole by each rank."""
    lora, strategy = recipe.lora, recipe.train.strategy_kind
    if lora is None:
        return
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    if lora.kind == "dora" and engine is not None and not engine.shares_weights:
        yield Keys("lora.kind", "rollout.engine").problem(
            f"dora given with rollout.engine {engine.name}, which refuses such adapters; write lora.kind: rslora, "
            "or rollout.engine: local"
        )
    if lora.kind == "dora" and strategy is not None and strategy.shards_model:
        yield Keys("lora.kind", "train.strategy").problem(
            f"dora given with train.strategy {strategy.name}, whose ranks hold parts of the weights that it "
            "measures; write lora.kind: rslora, or train.strategy: ddp"
        )
    if lora.start is None:
        return
    for key, stands, given, remedy in (
        ("model.quantize", recipe.model.quantize is None, "without model.quantize", "write model.quantize: nf4"),
        ("lora.init", lora.init is not None, "with lora.init, which starts elsewhere", "remove one of them"),
        ("lora.kind", lora.kind == "dora", "with lora.kind dora", "write lora.kind: lora or rslora"),
        (
            "rollout.engine",
            engine is not None and not engine.shares_weights,
            "with an engine that has the checkpoint's own weights, of which nothing was rounded off",
            "write rollout.engine: local",
        ),
    ):
        if stands:
            text = f"{lora.start} given {given}; {remedy}, or lora.start: null"
            yield Keys("lora.start", key).problem(text)


def _frozen_parts(recipe: BaseRecipe) -> Problems:
    """Require that a part is trained either by an adapter or whole, not both."""
    if recipe.lora is None:
        return
    if both := [part for part in whole_parts(recipe) if part in (adapted_parts(recipe) or ())]:
        parts = " and ".join(both)
        yield Keys("freeze", "lora.targets").problem(
            f"{shown(list(recipe.freeze))} given with lora.targets {recipe.lora.targets}, which adapts {parts}; "
            f"add {parts} to freeze, since an adapter leaves a part's own weights as they are, or take it out of "
            "lora.targets"
        )


def _part_rates(recipe: BaseRecipe) -> Problems:
    adapted = adapted_parts(recipe)
    if adapted is None:  # it depends on the model
        return
    for part in PARTS:
        rate = getattr(recipe.optim.part_lr, part)
        if rate is not None and part not in (*adapted, *whole_parts(recipe)):
            yield Keys(f"optim.part_lr.{part}", "freeze", "lora.targets", "lora").problem(
                f"{rate:g} given, but nothing of {part} is trained; remove it, or train {part}: take it out of "
                "freeze, or into lora.targets"
            )


def _reference_place(recipe: BaseRecipe) -> Problems:
    if recipe.model.reference == "device" or keeps_start(recipe):
        return
    condition, keys = COMPARES.get(recipe.kind, (None, ()))
    reason = "compares with no reference"
    if condition is not None:
        reason = f"keeps no copy of the start, which takes {condition}a part that is trained whole"
    yield Keys("model.reference", *keys).problem(
        f"{recipe.model.reference} given, but `tiercel {recipe.kind}` {reason}; remove it"
    )


def _lora_targets(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None or recipe.lora.targets in TARGET_WORDS:
        return
    targets = recipe.lora.targets
    words = ", ".join(TARGET_WORDS)
    is_expression = re.search(r"[\\.+?()\[\]|^$]", targets) is not None
    meant = None if is_expression else nearest_word("lora.targets", targets, TARGET_WORDS).key
    if meant is not None:
        yield Keys("lora.targets").problem(f"{shown(targets)} given; the words are {words}; write {meant}")
    elif (fault := regex_fault(targets)) is not None:
        yield Keys("lora.targets").problem(
            f"{shown(targets)} given; must be {words}, or a regular expression on module names ({fault})"
        )


def _something_to_train(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None and set(recipe.freeze) == {"vision", "projector", "language"}:
        yield Keys("freeze", "lora").problem(
            "all three parts are frozen and there is no lora, so nothing is trained; "
            "take a part out of freeze, or add the section lora"
        )


def _run_length(recipe: BaseRecipe) -> Problems:
    train, optim = recipe.train, recipe.optim
    if train.steps is None and train.epochs is None:
        yield Keys("train.steps", "train.epochs").problem(
            "neither train.steps nor train.epochs is given; write one of them"
        )
    if train.steps is not None and train.epochs is not None:
        yield Keys("train.steps", "train.epochs").problem(
            f"{train.steps} given beside train.epochs ({train.epochs:g}); write one of them"
        )
    if train.steps is not None and optim.warmup_steps > train.steps:
        yield Keys("optim.warmup_steps", "train.steps").problem(
            f"{optim.warmup_steps} given, above train.steps ({train.steps}); optim.lr would never be reached"
        )
    if optim.min_lr > 0 and (optim.schedule == "constant" or optim.min_lr > optim.lr):
        why = "a constant rate does not fall" if optim.schedule == "constant" else f"optim.lr is {optim.lr:g}"
        yield Keys("optim.min_lr", "optim.schedule", "optim.lr").problem(
            f"{optim.min_lr:g} given, but {why}; set a rate below optim.lr and optim.schedule to cosine, linear or wsd"
        )
    if optim.decay_steps is not None and optim.schedule != "wsd":
        yield Keys("optim.decay_steps", "optim.schedule").problem(
            f"{optim.decay_steps} given, but only optim.schedule: wsd has a decay of its own; remove it"
        )
    if train.profile is not None and train.steps is not None and (last := max(train.profile.steps)) > train.steps:
        yield Keys("train.profile.steps", "train.steps").problem(
            f"step {last} given, but the run has {train.steps}; name steps from 1 to {train.steps}"
        )
    if train.keep_best is not None:
        yield from _keep_best(recipe, train.keep_best)
    if train.eval_every is not None and recipe.data.eval is None:
        yield Keys("train.eval_every", "data.eval").problem(
            f"{train.eval_every} given, but there are no rows to evaluate on; write data.eval, or remove it"
        )


def _completion_fits_microbatch(recipe: GrpoRecipe) -> Problems:
    prompt, completion = recipe.data.max_prompt_tokens, recipe.rollout.longest
    key = "rollout.max_trajectory_tokens" if recipe.rollout.has_turns else "rollout.max_new_tokens"
    budget = recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and (needed := recipe.smallest_microbatch(prompt)) > budget:
        yield Keys("learner.max_tokens_per_microbatch", "data.max_prompt_tokens", key).problem(
            f"{budget} given; must hold a prompt and one completion: data.max_prompt_tokens ({prompt}) + "
            f"{key} ({completion}) = {needed}"
        )


def _completion_length(recipe: GrpoRecipe) -> Problems:
    low, high = recipe.rollout.min_new_tokens, recipe.rollout.max_new_tokens
    if low > high:
        yield Keys("rollout.min_new_tokens", "rollout.max_new_tokens").problem(
            f"{low} given, above rollout.max_new_tokens ({high}); no completion can satisfy both"
        )


def _stop_strings(recipe: GrpoRecipe) -> Problems:
    if "" in recipe.rollout.stop:
        yield Keys("rollout.stop").problem('"" given; every text holds it, so no completion could be made')


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
                f"given with {path}.{choice} {chosen}, which does not read it; write {path}.{choice}: {readers}, "
                "or remove it"
            )


def _engine_keys(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    yield from _keys_of_others("rollout", rollout, "engine", ENGINE_KINDS)
    for key, remedy in rollout.engine_kind.required_keys.items():
        if not getattr(rollout, key):
            yield Keys(f"rollout.{key}", "rollout.engine").problem(f"missing; {remedy}")
    for index, url in enumerate(rollout.urls):
        if (fault := address_fault(url)) is not None:
            yield Keys(f"rollout.urls.{index}").problem(f"{fault}; write it like http://127.0.0.1:8000")


def _engine(recipe: GrpoRecipe) -> Problems:
    rollout, engine = recipe.rollout, recipe.rollout.engine_kind
    if rollout.lookahead and not engine.samples_ahead:
        able = " or ".join(each.name for each in ENGINE_KINDS.values() if each.samples_ahead)
        yield Keys("rollout.lookahead", "rollout.engine").problem(
            f"{rollout.lookahead} given with rollout.engine {engine.name}, which has no processors of its own "
            f"to sample on while the learner works; write rollout.lookahead: 0, or rollout.engine: {able}"
        )
    if rollout.lookahead > rollout.max_staleness:
        yield Keys("rollout.lookahead", "rollout.max_staleness").problem(
            f"{rollout.lookahead} given, above rollout.max_staleness ({rollout.max_staleness}): completions would be "
            f"{rollout.lookahead} versions old; write max_staleness: {rollout.lookahead}, or a lower lookahead"
        )
    if rollout.lookahead > 1 and recipe.lora is None:
        yield Keys("rollout.lookahead", "lora").problem(
            f"{rollout.lookahead} given without lora: a server's new weights would replace those that it is still "
            "sampling from; write lookahead: 1, or add the section lora, whose versions lie side by side"
        )
    if engine.is_beside and recipe.lora is None and rollout.vllm.sleep_level == 2:
        yield Keys("rollout.vllm.sleep_level", "lora").problem(
            "2 given without lora, but then the engine would read the checkpoint's weights in place of the "
            "policy's; write sleep_level: 1, or add the section lora"
        )
    if not engine.shares_weights and recipe.lora is not None and whole_parts(recipe):
        yield Keys("rollout.engine", "freeze").problem(
            f"{engine.name} given with lora and freeze {shown(list(recipe.freeze))}; {engine.title} would leave "
            "out what is trained whole beside an adapter; write freeze: [vision, projector], with lora.targets: all to "
            "adapt them, or rollout.engine: local"
        )


def _keep_best(recipe: BaseRecipe, metric: str) -> Problems:
    if recipe.data.eval is None:
        yield Keys("train.keep_best", "data.eval").problem(
            f"{metric} given, but there are no rows to evaluate on; write data.eval, or remove it"
        )
    elif metric not in EVALUATED[recipe.purpose]:
        metrics = " or ".join(EVALUATED[recipe.purpose])
        yield Keys("train.keep_best").problem(f"{metric} given, which these evaluations do not have; write {metrics}")


def _context(recipe: BaseRecipe) -> Problems:
    """Check what ranks need in order to compute a microbatch together."""
    size, strategy, form = recipe.train.context_parallel, recipe.train.strategy_kind, recipe.learner.form
    if size == 1:
        return
    if strategy is not None and strategy.is_alone:
        yield Keys("train.context_parallel", "train.strategy").problem(
            f"{size} given with train.strategy {strategy.name}, which has one rank; write auto, or remove it"
        )
    if form in ("split", "repeated"):
        yield Keys("train.context_parallel", "learner.form").problem(
            f"{size} given with learner.form {form}, which ranks cannot compute together; write learner.form: auto"
        )


def _strategy(recipe: BaseRecipe) -> Problems:
    yield from _keys_of_others("train", recipe.train, "strategy", STRATEGY_KINDS)
    kind = recipe.train.strategy_kind
    if kind is None:
        return
    zero = recipe.train.deepspeed
    if "deepspeed" in kind.own_keys and zero.stage == 2 and zero.offload_parameters:
        yield Keys("train.deepspeed.offload_parameters", "train.deepspeed.stage").problem(
            "true given with stage 2, which leaves weights whole on every rank; write stage: 3, or false"
        )
    if recipe.model.dtype == "float16" and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Keys("model.dtype", "train.strategy").problem(
            f"float16 given with train.strategy {kind.name}, whose ranks see parts of the gradient and could "
            "disagree about an overflow; write model.dtype: bfloat16 or float32, or train.strategy: ddp"
        )
    if recipe.reliability.max_skipped_updates and not kind.skips_updates:
        yield Keys("reliability.max_skipped_updates", "train.strategy").problem(
            f"{recipe.reliability.max_skipped_updates} given with train.strategy {kind.name}, which keeps the "
            "gradients of an update that is left out; write 0, or train.strategy: fsdp2"
        )
    if not recipe.optim.is_of_torch and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Keys("optim.name", "train.strategy").problem(
            f"{recipe.optim.name} given with train.strategy {kind.name}, whose ranks hold parts of the moments, "
            "which bitsandbytes cannot divide; write adamw, or train.strategy: ddp"
        )
    if recipe.optim.name == "muon" and kind.shards_model:
        yield Keys("optim.name", "train.strategy").problem(
            f"muon given with train.strategy {kind.name}, whose ranks hold parts of each weight, but Muon's step "
            "follows from the whole matrix; write adamw, or train.strategy: ddp"
        )
    if (changing := _what_trains_vision(recipe)) and not kind.trains_vision:
        yield Keys("train.strategy", "lora", "freeze").problem(
            f"{kind.name} given with {changing}; ZeRO would wait for every rank at each picture, and a step whose "
            "ranks hold different numbers of pictures hangs; write train.strategy: fsdp2, or train the language only"
        )


def _muon(recipe: BaseRecipe) -> Problems:
    """Refuse Muon where its step is no step of a weight, and its key where it is not used."""
    if recipe.optim.name == "muon" and recipe.lora is not None:
        yield Keys("optim.name", "lora").problem(
            "muon given with the section lora, whose two small factors have no step as their product would have; "
            "write adamw, or remove lora"
        )
    momentum = recipe.optim.momentum
    if recipe.optim.name != "muon" and momentum != type(recipe.optim).model_fields["momentum"].default:
        yield Keys("optim.momentum", "optim.name").problem(
            f"{momentum:g} given with optim.name {recipe.optim.name}, which does not read it; write optim.betas, or "
            "optim.name: muon"
        )


def _compile(recipe: BaseRecipe) -> Problems:
    obstacle = compile_obstacle(recipe, recipe.train.strategy_kind)
    if recipe.learner.compile is True and obstacle is not None:
        yield Keys("learner.compile", obstacle.key).problem(f"true given with {obstacle}")


def _trackers(recipe: BaseRecipe) -> Problems:
    for index, name in enumerate(recipe.trackers):
        if name in recipe.trackers[:index]:
            yield Keys(f"trackers.{index}").problem(f"{name} given twice; write it once")


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

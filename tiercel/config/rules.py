"""Judgements that look at more than one key. They refuse and never fill in."""

from collections.abc import Callable, Mapping

from tiercel.config.algorithm_rules import ALGORITHM_RULES
from tiercel.config.compiling import compile_obstacle
from tiercel.config.data import HeldOut
from tiercel.config.engines import ENGINE_KINDS, EngineKind
from tiercel.config.offline_rules import OFFLINE_RULES, dropout
from tiercel.config.parts import PARTS, adapted_parts, keeps_start, whole_parts
from tiercel.config.reward_rules import reward_entries, reward_names
from tiercel.config.schema import BaseRecipe, GrpoRecipe, Kind, Purpose, Recipe
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.config.suggestions import nearest_word
from tiercel.config.teacher_rules import distill, teacher, template_problems
from tiercel.config.turn_rules import turns
from tiercel.sections import Problem, Problems, Section, address_fault, regex_fault, shown

EVALUATED: dict[Purpose, tuple[str, ...]] = {
    "sft": ("eval/loss",),
    "pairs": ("eval/loss", "eval/accuracy"),
    "labels": ("eval/loss",),
    "grpo": ("eval/accuracy", "eval/reward/mean"),
}
# When a verb compares with a reference, and the keys that decide whether it keeps a copy of the start for that.
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


def rule_problems(recipe: Recipe) -> list[Problem]:
    """List all judgements on a recipe that the schema admits, in the order of its sections. Reads no file."""
    problems = [problem for rule in COMMON_RULES for problem in rule(recipe)]
    if isinstance(recipe, GrpoRecipe):
        return problems + [problem for rule in GRPO_RULES for problem in rule(recipe)]
    return problems + [problem for rule in OFFLINE_RULES for problem in rule(recipe)]


def _pixels(recipe: BaseRecipe) -> Problems:
    low, high = recipe.model.min_pixels, recipe.model.max_pixels
    if low is not None and high is not None and low > high:
        yield Problem(
            key="model.min_pixels",
            text=f"{low} given, above model.max_pixels ({high}); no image can satisfy both",
            also=("model.max_pixels",),
        )


def _held_out(recipe: BaseRecipe) -> Problems:
    held = recipe.data.eval
    if isinstance(held, HeldOut) and (held.fraction is None) == (held.count is None):
        given = "both fraction and count are" if held.count is not None else "neither fraction nor count is"
        yield Problem(key="data.eval", text=f"{given} given; write {{fraction: 0.01}} or {{count: 100}}")


def _learnt_turns(recipe: GrpoRecipe) -> Problems:
    if recipe.data.group_by_prefix:
        yield Problem(
            key="data.group_by_prefix",
            text=f"true given, but `tiercel {recipe.kind}` groups the completions of each prompt; remove it",
        )
    if recipe.data.train_turns != "all":
        yield Problem(
            key="data.train_turns",
            text=f"{recipe.data.train_turns} given, but `tiercel {recipe.kind}` learns completions; remove it",
        )


def _vision_cache(recipe: BaseRecipe) -> Problems:
    """Require a frozen tower and projector: features are taken after the projector."""
    given = recipe.model.vision_cache_bytes
    changing = _what_trains_vision(recipe)
    if given > 0 and changing:
        yield Problem(
            key="model.vision_cache_bytes",
            text=f"{given} given with {changing}; kept features would be those of an older vision tower or projector; "
            "write model.vision_cache_bytes: 0, or train the language model only",
            also=("lora", "freeze"),
        )


def _what_trains_vision(recipe: BaseRecipe) -> str | None:
    """Return the key and value that make tower or projector change, as far as the recipe alone tells."""
    if recipe.lora is not None and {"vision", "projector"} & set(adapted_parts(recipe) or ()):
        return f"lora.targets {recipe.lora.targets}"
    return f"freeze {shown(list(recipe.freeze))}" if {"vision", "projector"} & set(whole_parts(recipe)) else None


def _quantized(recipe: BaseRecipe) -> Problems:
    """Require that quantised weights stay as they are, and whole on each rank."""
    kind, strategy = recipe.model.quantize, recipe.train.strategy_kind
    if kind is None:
        return
    if recipe.lora is None:
        yield Problem(
            key="model.quantize",
            text=f"{kind} given without lora, but quantised weights cannot be trained; add the section lora, or remove "
            "it",
            also=("lora",),
        )
    if strategy is not None and strategy.shards_model:
        yield Problem(
            key="model.quantize",
            text=f"{kind} given with train.strategy {strategy.name}, which cannot share quantised weights over ranks; "
            "write train.strategy: ddp, or remove it",
            also=("train.strategy",),
        )
    if isinstance(recipe, GrpoRecipe) and not recipe.rollout.engine_kind.shares_weights:
        engine = recipe.rollout.engine_kind.name
        if recipe.algorithm.correction.level == "none":
            yield Problem(
                key="algorithm.correction.level",
                text=f"none given with model.quantize {kind} and rollout.engine {engine}, which samples from the "
                "checkpoint's own weights; write token or sequence, or rollout.engine: local",
                also=("model.quantize", "rollout.engine"),
            )


def _adapter_kind(recipe: BaseRecipe) -> Problems:
    """Keep DoRA and LoftQ to what applies them exactly: the trainer's own model, whole on each rank."""
    lora, strategy = recipe.lora, recipe.train.strategy_kind
    if lora is None:
        return
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    if lora.kind == "dora" and engine is not None and not engine.shares_weights:
        yield Problem(
            key="lora.kind",
            text=f"dora given with rollout.engine {engine.name}, which refuses such adapters; write lora.kind: rslora, "
            "or rollout.engine: local",
            also=("rollout.engine",),
        )
    if lora.kind == "dora" and strategy is not None and strategy.shards_model:
        yield Problem(
            key="lora.kind",
            text=f"dora given with train.strategy {strategy.name}, whose ranks hold parts of the weights that it "
            "measures; write lora.kind: rslora, or train.strategy: ddp",
            also=("train.strategy",),
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
            yield Problem(key="lora.start", text=text, also=(key,))


def _frozen_parts(recipe: BaseRecipe) -> Problems:
    """Require that a part is trained by an adapter or whole, not both."""
    if recipe.lora is None:
        return
    if both := [part for part in whole_parts(recipe) if part in (adapted_parts(recipe) or ())]:
        parts = " and ".join(both)
        yield Problem(
            key="freeze",
            text=f"{shown(list(recipe.freeze))} given with lora.targets {recipe.lora.targets}, which adapts {parts}; "
            f"add {parts} to freeze, since an adapter leaves a part's own weights as they are, or take it out of "
            "lora.targets",
            also=("lora.targets",),
        )


def _part_rates(recipe: BaseRecipe) -> Problems:
    adapted = adapted_parts(recipe)
    if adapted is None:  # the model tells
        return
    for part in PARTS:
        rate = getattr(recipe.optim.part_lr, part)
        if rate is not None and part not in (*adapted, *whole_parts(recipe)):
            yield Problem(
                key=f"optim.part_lr.{part}",
                text=f"{rate:g} given, but nothing of {part} is trained; remove it, or train {part}: take it out of "
                "freeze, or into lora.targets",
                also=("freeze", "lora.targets", "lora"),
            )


def _reference_place(recipe: BaseRecipe) -> Problems:
    if recipe.model.reference == "device" or keeps_start(recipe):
        return
    condition, keys = COMPARES.get(recipe.kind, (None, ()))
    reason = "compares with no reference"
    if condition is not None:
        reason = f"keeps no copy of the start, which takes {condition}a part that is trained whole"
    yield Problem(
        key="model.reference",
        text=f"{recipe.model.reference} given, but `tiercel {recipe.kind}` {reason}; remove it",
        also=keys,
    )


def _lora_targets(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None or recipe.lora.targets in TARGET_WORDS:
        return
    targets = recipe.lora.targets
    words = ", ".join(TARGET_WORDS)
    meant = nearest_word("lora.targets", targets, TARGET_WORDS).key
    if meant is not None:
        yield Problem(key="lora.targets", text=f"{shown(targets)} given; the words are {words}; write {meant}")
    elif (fault := regex_fault(targets)) is not None:
        yield Problem(
            key="lora.targets",
            text=f"{shown(targets)} given; must be {words}, or a regular expression on module names ({fault})",
        )


def _something_to_train(recipe: BaseRecipe) -> Problems:
    if recipe.lora is None and set(recipe.freeze) == {"vision", "projector", "language"}:
        yield Problem(
            key="freeze",
            text="all three parts are frozen and there is no lora, so nothing is trained; "
            "take a part out of freeze, or add the section lora",
            also=("lora",),
        )


def _run_length(recipe: BaseRecipe) -> Problems:
    train, optim = recipe.train, recipe.optim
    if train.steps is None and train.epochs is None:
        yield Problem(
            key="train.steps",
            text="neither train.steps nor train.epochs is given; write one of them",
            also=("train.epochs",),
        )
    if train.steps is not None and train.epochs is not None:
        yield Problem(
            key="train.steps",
            text=f"{train.steps} given beside train.epochs ({train.epochs:g}); write one of them",
            also=("train.epochs",),
        )
    if train.steps is not None and optim.warmup_steps > train.steps:
        yield Problem(
            key="optim.warmup_steps",
            text=f"{optim.warmup_steps} given, above train.steps ({train.steps}); optim.lr would never be reached",
            also=("train.steps",),
        )
    if train.profile is not None and train.steps is not None and (last := max(train.profile.steps)) > train.steps:
        yield Problem(
            key="train.profile.steps",
            text=f"step {last} given, but the run has {train.steps}; name steps from 1 to {train.steps}",
            also=("train.steps",),
        )
    if train.keep_best is not None:
        yield from _keep_best(recipe, train.keep_best)
    if train.eval_every is not None and recipe.data.eval is None:
        yield Problem(
            key="train.eval_every",
            text=f"{train.eval_every} given, but there are no rows to evaluate on; write data.eval, or remove it",
            also=("data.eval",),
        )


def _completion_fits_microbatch(recipe: GrpoRecipe) -> Problems:
    prompt, completion = recipe.data.max_prompt_tokens, recipe.rollout.longest
    key = "rollout.max_trajectory_tokens" if recipe.rollout.has_turns else "rollout.max_new_tokens"
    budget = recipe.learner.max_tokens_per_microbatch
    if budget != "auto" and (needed := recipe.smallest_microbatch(prompt)) > budget:
        yield Problem(
            key="learner.max_tokens_per_microbatch",
            text=f"{budget} given; must hold a prompt and one completion: data.max_prompt_tokens ({prompt}) + "
            f"{key} ({completion}) = {needed}",
            also=("data.max_prompt_tokens", key),
        )


def _completion_length(recipe: GrpoRecipe) -> Problems:
    low, high = recipe.rollout.min_new_tokens, recipe.rollout.max_new_tokens
    if low > high:
        yield Problem(
            key="rollout.min_new_tokens",
            text=f"{low} given, above rollout.max_new_tokens ({high}); no completion can satisfy both",
            also=("rollout.max_new_tokens",),
        )


def _stop_strings(recipe: GrpoRecipe) -> Problems:
    if "" in recipe.rollout.stop:
        yield Problem(key="rollout.stop", text='"" given; every text holds it, so no completion could be made')


def _keys_of_others(
    path: str, section: Section, choice: str, kinds: Mapping[str, EngineKind] | Mapping[str, StrategyKind]
) -> Problems:
    """Refuse keys of a section that what its key `choice` names does not read, but another would."""
    chosen = getattr(section, choice)
    own = kinds[chosen].own_keys if chosen in kinds else ()
    for key in dict.fromkeys(key for kind in kinds.values() for key in kind.own_keys if key not in own):
        if getattr(section, key) != type(section).model_fields[key].default:
            readers = " or ".join(kind.name for kind in kinds.values() if key in kind.own_keys)
            yield Problem(
                key=f"{path}.{key}",
                text=f"given with {path}.{choice} {chosen}, which does not read it; write {path}.{choice}: {readers}, "
                "or remove it",
                also=(f"{path}.{choice}",),
            )


def _engine_keys(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    yield from _keys_of_others("rollout", rollout, "engine", ENGINE_KINDS)
    for key, remedy in rollout.engine_kind.required_keys.items():
        if not getattr(rollout, key):
            yield Problem(key=f"rollout.{key}", text=f"missing; {remedy}", also=("rollout.engine",))
    for index, url in enumerate(rollout.urls):
        if (fault := address_fault(url)) is not None:
            yield Problem(key=f"rollout.urls.{index}", text=f"{fault}; write it like http://127.0.0.1:8000")


def _engine(recipe: GrpoRecipe) -> Problems:
    rollout, engine = recipe.rollout, recipe.rollout.engine_kind
    if rollout.lookahead and not engine.samples_ahead:
        able = " or ".join(each.name for each in ENGINE_KINDS.values() if each.samples_ahead)
        yield Problem(
            key="rollout.lookahead",
            text=f"{rollout.lookahead} given with rollout.engine {engine.name}, which has no processors of its own "
            f"to sample on while the learner works; write rollout.lookahead: 0, or rollout.engine: {able}",
            also=("rollout.engine",),
        )
    strategy = recipe.train.strategy_kind
    if not engine.shares_weights and recipe.lora is None and strategy is not None and strategy.divides_adapters:
        yield Problem(
            key="train.strategy",
            text=f"{strategy.name} given with rollout.engine {engine.name} and without lora, which was not tried; "
            "write train.strategy: fsdp2, or rollout.engine: local, or add the section lora",
            also=("rollout.engine", "lora"),
        )
    if engine.is_beside and recipe.lora is None and rollout.vllm.sleep_level == 2:
        yield Problem(
            key="rollout.vllm.sleep_level",
            text="2 given without lora, but then the engine would read the checkpoint's weights in place of the "
            "policy's; write sleep_level: 1, or add the section lora",
            also=("lora",),
        )
    if not engine.shares_weights and recipe.lora is not None and whole_parts(recipe):
        yield Problem(
            key="rollout.engine",
            text=f"{engine.name} given with lora and freeze {shown(list(recipe.freeze))}; {engine.title} would leave "
            "out what is trained whole beside an adapter; write freeze: [vision, projector], with lora.targets: all to "
            "adapt them, or rollout.engine: local",
            also=("freeze",),
        )


def _keep_best(recipe: BaseRecipe, metric: str) -> Problems:
    if recipe.data.eval is None:
        yield Problem(
            key="train.keep_best",
            text=f"{metric} given, but there are no rows to evaluate on; write data.eval, or remove it",
            also=("data.eval",),
        )
    elif metric not in EVALUATED[recipe.purpose]:
        metrics = " or ".join(EVALUATED[recipe.purpose])
        yield Problem(
            key="train.keep_best", text=f"{metric} given, which these evaluations do not have; write {metrics}"
        )


def _strategy(recipe: BaseRecipe) -> Problems:
    yield from _keys_of_others("train", recipe.train, "strategy", STRATEGY_KINDS)
    kind = recipe.train.strategy_kind
    if kind is None:
        return
    zero = recipe.train.deepspeed
    if "deepspeed" in kind.own_keys and zero.stage == 2 and zero.offload_parameters:
        yield Problem(
            key="train.deepspeed.offload_parameters",
            text="true given with stage 2, which leaves weights whole on every rank; write stage: 3, or false",
            also=("train.deepspeed.stage",),
        )
    if recipe.model.dtype == "float16" and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Problem(
            key="model.dtype",
            text=f"float16 given with train.strategy {kind.name}, whose ranks see parts of the gradient and could "
            "disagree about an overflow; write model.dtype: bfloat16 or float32, or train.strategy: ddp",
            also=("train.strategy",),
        )
    if recipe.reliability.max_skipped_updates and not kind.skips_updates:
        yield Problem(
            key="reliability.max_skipped_updates",
            text=f"{recipe.reliability.max_skipped_updates} given with train.strategy {kind.name}, which keeps the "
            "gradients of an update that is left out; write 0, or train.strategy: fsdp2",
            also=("train.strategy",),
        )
    if recipe.optim.name != "adamw" and kind.divides_trained(has_adapters=recipe.lora is not None):
        yield Problem(
            key="optim.name",
            text=f"{recipe.optim.name} given with train.strategy {kind.name}, whose ranks hold parts of the moments, "
            "which bitsandbytes cannot divide; write adamw, or train.strategy: ddp",
            also=("train.strategy",),
        )
    if (changing := _what_trains_vision(recipe)) and not kind.trains_vision:
        yield Problem(
            key="train.strategy",
            text=f"{kind.name} given with {changing}; ZeRO would wait for every rank at each picture, and a step whose "
            "ranks hold different numbers of pictures hangs; write train.strategy: fsdp2, or train the language only",
            also=("lora", "freeze"),
        )


def _compile(recipe: BaseRecipe) -> Problems:
    obstacle = compile_obstacle(recipe, recipe.train.strategy_kind)
    if recipe.learner.compile is True and obstacle is not None:
        yield Problem(key="learner.compile", text=f"true given with {obstacle}", also=(obstacle.key,))


def _trackers(recipe: BaseRecipe) -> Problems:
    for index, name in enumerate(recipe.trackers):
        if name in recipe.trackers[:index]:
            yield Problem(key=f"trackers.{index}", text=f"{name} given twice; write it once")


COMMON_RULES: tuple[Callable[[BaseRecipe], Problems], ...] = (
    _pixels,
    _held_out,
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
    *ALGORITHM_RULES,
    dropout,
    reward_entries,
    reward_names,
    turns,
    teacher,
    distill,
)

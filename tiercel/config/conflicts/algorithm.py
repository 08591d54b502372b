"""Check that the losses, advantages, penalties and ways of sampling of a recipe make sense together.

What a loss or an advantage needs and reads is in its table in tiercel/algorithms; the rules here look it up there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tiercel.algorithms.advantages import ADVANTAGES, OwnAdvantage, advantage_of
from tiercel.algorithms.losses import LOSSES, LossKeys, OwnLoss
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.surrogates import SURROGATES, SurrogateKeys
from tiercel.calls import CALL_FORM, is_call
from tiercel.config.conflicts.rewards import TELLS_RIGHT, tells_right
from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.schema import Algorithm, GrpoRecipe
from tiercel.sections import Keys, Problems, shown

DEFAULTS = Algorithm()


def updates_per_rollout(recipe: GrpoRecipe) -> int:
    """Return how many optimiser updates a step has."""
    return recipe.optim.minibatches * recipe.optim.rollout_epochs


def _minibatches(recipe: GrpoRecipe) -> Problems:
    prompts, minibatches = recipe.optim.prompts_per_step, recipe.optim.minibatches
    if prompts % minibatches:
        divisors = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        yield Keys("optim.minibatches", "optim.prompts_per_step").problem(
            f"{minibatches} given; must divide optim.prompts_per_step ({prompts}), since groups are not "
            f"split between updates; write one of {', '.join(divisors)}"
        )


def _group_size(recipe: GrpoRecipe) -> Problems:
    advantage = recipe.algorithm.advantage
    if recipe.rollout.group_size > 1 or not recipe.learns_from_rewards:
        return
    if advantage_of(advantage).least_group > 1:
        alone = next(name for name, each in ADVANTAGES.items() if each.least_group == 1)
        remedy = f"algorithm.advantage: {alone}" if isinstance(advantage, str) else "algorithm.advantage.least_group: 1"
        yield Keys("rollout.group_size", "algorithm.advantage").problem(
            "1 given; the advantage of a single completion is undefined, since reward - group mean is always 0; "
            f"write 2 or more, or {remedy}"
        )
    elif recipe.optim.prompts_per_step == 1 and isinstance(advantage, str):
        yield Keys("optim.prompts_per_step", "rollout.group_size").problem(
            f"1 given with rollout.group_size 1; {advantage} compares the completions of a step, of which there "
            "would be one; write 2 or more"
        )


def _truncated_sampling(recipe: GrpoRecipe) -> Problems:
    rollout, updates = recipe.rollout, updates_per_rollout(recipe)
    cuts = {"rollout.top_p": (rollout.top_p, rollout.top_p < 1), "rollout.top_k": (rollout.top_k, rollout.top_k > 0)}
    for key, (value, is_cut) in cuts.items():
        if is_cut and updates > 1:
            cause = "minibatches" if recipe.optim.minibatches > 1 else "rollout_epochs"
            full = 1 if key == "rollout.top_p" else 0
            yield Keys(key, f"optim.{cause}").problem(
                f"{value} given with optim.{cause} {getattr(recipe.optim, cause)}; the ratio of new to old policy "
                f"is not defined for tokens that the cut removes; write {key}: {full}, or optim.{cause}: 1"
            )


def _correction(recipe: GrpoRecipe) -> Problems:
    rollout, correction = recipe.rollout, recipe.algorithm.correction
    if rollout.lookahead and rollout.engine == "vllm-server" and correction.level == "none":
        yield Keys("algorithm.correction.level", "rollout.lookahead").problem(
            f"none given with rollout.lookahead {rollout.lookahead}, whose completions an older policy drew; "
            "write token or sequence"
        )
    if correction.floor is not None and correction.level == "none":
        yield Keys("algorithm.correction.floor", "algorithm.correction.level").problem(
            f"{correction.floor:g} given with level none, which takes no ratio; write level: token or sequence, or "
            "remove it"
        )
    for key, is_cut in (("rollout.top_p", rollout.top_p < 1), ("rollout.top_k", rollout.top_k > 0)):
        value = rollout.top_p if key == "rollout.top_p" else rollout.top_k
        cause = "algorithm.correction" if correction.level != "none" else "algorithm.off_policy_delta"
        if is_cut and (correction.level != "none" or recipe.algorithm.off_policy_delta is not None):
            yield Keys(key, f"{cause}.level" if cause == "algorithm.correction" else cause).problem(
                f"{value} given with {cause}; an engine's probabilities are those after the cut, the learner's "
                f"those before it; leave it out, or write {cause}{_OFF[cause]}"
            )
    shared = _shared_gradient(recipe.algorithm)
    if correction.level == "token" and shared is not None:
        yield Keys("algorithm.correction.level", *PARTS).problem(
            f"token given with {shared.given}, whose tokens share one ratio; write sequence, or {shared.remedy}"
        )


_OFF = {"algorithm.correction": ".level: none", "algorithm.off_policy_delta": ": null"}
PARTS = ("algorithm.loss", "algorithm.ratio", "algorithm.surrogate")


def _own_functions(recipe: GrpoRecipe) -> Problems:
    for key in ("loss", "advantage"):
        own = getattr(recipe.algorithm, key)
        if isinstance(own, OwnLoss | OwnAdvantage) and not is_call(own.call):
            yield Keys(f"algorithm.{key}.call").problem(f"{shown(own.call)} given; must be {CALL_FORM}")


def _loss(recipe: GrpoRecipe) -> Problems:
    algorithm = recipe.algorithm
    yield from _parts(algorithm)
    yield from _unread_keys(algorithm)
    if algorithm.delta is not None and algorithm.clip_high is not None and algorithm.delta <= 1 + algorithm.clip_high:
        yield Keys("algorithm.delta", "algorithm.clip_high").problem(
            f"{algorithm.delta:g} given, not above 1 + algorithm.clip_high = {1 + algorithm.clip_high:g}; it "
            "bounds ratios beyond the upper clip; write a larger one, such as 4"
        )
    yield from _entropy(algorithm)
    shared = _shared_gradient(algorithm)
    if algorithm.top_entropy < 1 and shared is not None:
        yield Keys("algorithm.top_entropy", *PARTS).problem(
            f"{algorithm.top_entropy:g} given with {shared.given}, whose tokens share one gradient; write "
            f"{shared.remedy}"
        )


def _entropy(algorithm: Algorithm) -> Problems:
    """Refuse keys that belong to an entropy term or to a share of tokens by entropy if the recipe has none."""
    if algorithm.entropy_mean != "loss" and algorithm.entropy_coef == 0:
        yield Keys("algorithm.entropy_mean", "algorithm.entropy_coef").problem(
            f"{algorithm.entropy_mean} given with algorithm.entropy_coef 0; write a coef, such as 0.001, or remove it"
        )
    if algorithm.top_entropy_of != "learnt" and algorithm.top_entropy == 1:
        yield Keys("algorithm.top_entropy_of", "algorithm.top_entropy").problem(
            f"{algorithm.top_entropy_of} given with algorithm.top_entropy 1; write a share, such as 0.2, or remove it"
        )


def _parts(keys: LossKeys) -> Problems:
    """Check a ratio and a surrogate that the recipe names separately from the loss."""
    parts = keys.parts
    if parts is None:
        for name in ("ratio", "surrogate"):
            if getattr(keys, name) is not None:
                yield Keys(f"algorithm.{name}", "algorithm.loss").problem(
                    f"{getattr(keys, name)} given with a loss of your own, which does not read it; remove it"
                )
        return
    equal = next((name for name, each in RATIOS.items() if each.by_token == parts.ratio), None)
    if equal is not None and not SURROGATES[parts.surrogate].learns_by_ratio:
        yield Keys("algorithm.ratio" if keys.ratio else "algorithm.surrogate", *PARTS).problem(
            f"{keys.ratio or keys.surrogate} given; the surrogate {parts.surrogate} takes the ratio without "
            f"gradient, so {parts.ratio} would be the same as {equal}; write algorithm.ratio: {equal}"
        )


def _unread_keys(algorithm: Algorithm) -> Problems:
    """Refuse bounds and gates that the loss does not read."""
    parts = algorithm.parts
    reads: tuple[str, ...] = ()
    given = "a loss of your own"
    if parts is not None:
        reads = SURROGATES[parts.surrogate].reads
        given = f"algorithm.surrogate {parts.surrogate}" if algorithm.surrogate else f"algorithm.loss {algorithm.loss}"
    for name in SurrogateKeys.model_fields:
        value = getattr(algorithm, name)
        if name not in reads and value != getattr(DEFAULTS, name):
            yield Keys(f"algorithm.{name}", "algorithm.loss", "algorithm.surrogate").problem(
                f"{'null' if value is None else f'{value:g}'} given with {given}, which does not read it; remove it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGradient:
    """A key that makes all tokens of a completion share one gradient."""

    given: str  # the key and its value
    remedy: str  # what to write so that each token has its own gradient


def _shared_gradient(keys: LossKeys) -> SharedGradient | None:
    parts = keys.parts
    ratio = RATIOS[parts.ratio].by_token if parts is not None else None
    if parts is None or ratio is None or not SURROGATES[parts.surrogate].learns_by_ratio:
        return None
    if keys.ratio is not None:
        return SharedGradient(given=f"algorithm.ratio {keys.ratio}", remedy=f"algorithm.ratio: {ratio}")
    named = LOSSES[keys.loss] if isinstance(keys.loss, str) else parts
    same = (ratio, parts.surrogate, named.normalise)
    names = [name for name, loss in LOSSES.items() if (loss.ratio, loss.surrogate, loss.normalise) == same]
    remedy = f"algorithm.loss: {names[0]}" if names else f"algorithm.ratio: {ratio}"
    return SharedGradient(given=f"algorithm.loss {keys.loss}", remedy=remedy)


def _advantage(recipe: GrpoRecipe) -> Problems:
    algorithm = recipe.algorithm
    advantage = advantage_of(algorithm.advantage)
    if algorithm.scale is not None and advantage.scale is None:
        yield Keys("algorithm.scale", "algorithm.advantage").problem(
            f"{algorithm.scale} given with algorithm.advantage {algorithm.advantage}, which has a scale of its "
            "own; remove it"
        )
    if advantage.needs_pass_k:
        yield from _pass_k(recipe)
    elif algorithm.pass_k is not None and isinstance(algorithm.advantage, str):
        reader = next(name for name, each in ADVANTAGES.items() if each.needs_pass_k)
        yield Keys("algorithm.pass_k", "algorithm.advantage").problem(
            f"{algorithm.pass_k} given with algorithm.advantage {algorithm.advantage}, which does not read it; "
            f"write algorithm.advantage: {reader}, or remove it"
        )
    if advantage.looks_at == "right" and not any(tells_right(reward) for reward in recipe.rewards):
        yield Keys("algorithm.advantage", "rewards").problem(
            f"{algorithm.advantage} given, but no reward tells right from wrong; give one of them a correct_at, "
            f"or take one of {', '.join(TELLS_RIGHT)}"
        )


def _pass_k(recipe: GrpoRecipe) -> Problems:
    k, size = recipe.algorithm.pass_k, recipe.rollout.group_size
    if k is None:
        yield Keys("algorithm.pass_k", "algorithm.advantage").problem(
            f"missing; algorithm.advantage {recipe.algorithm.advantage} needs the number of tries of which one "
            "has to be right, such as 4"
        )
    elif k >= size > 1:
        yield Keys("algorithm.pass_k", "rollout.group_size").problem(
            f"{k} given; must be below rollout.group_size ({size}), since {k} of a group are drawn"
        )


def _reference(recipe: GrpoRecipe) -> Problems:
    kl = recipe.algorithm.kl
    if kl.coef == 0:
        for name, value, is_given in (
            ("place", kl.place, kl.place != "loss"),
            ("by_ratio", "true", kl.by_ratio),
            ("sync_every", kl.sync_every, kl.sync_every is not None),
        ):
            if is_given:
                yield Keys(f"algorithm.kl.{name}", "algorithm.kl.coef").problem(
                    f"{value} given with algorithm.kl.coef 0, which has no reference; write a coef, such as 0.04, "
                    "or remove it"
                )
        return
    if keeps_start(recipe):
        yield from _kept_start(recipe)
    if kl.estimator == "k1" and kl.place == "loss":
        yield Keys("algorithm.kl.estimator", "algorithm.kl.place").problem(
            "k1 given with algorithm.kl.place loss; its gradient averages to 0, so it would only add noise; write "
            "k2 or k3, or algorithm.kl.place: reward"
        )
    if kl.place == "reward" and advantage_of(recipe.algorithm.advantage).looks_at in ("rewards", "right"):
        yield Keys("algorithm.kl.place", "algorithm.advantage").problem(
            f"reward given with algorithm.advantage {recipe.algorithm.advantage}, which does not look at the sum "
            "of the rewards, from which the penalty is subtracted; write loss"
        )
    if kl.by_ratio and (kl.place, kl.estimator) != ("loss", "k3"):
        yield Keys("algorithm.kl.by_ratio", "algorithm.kl.estimator", "algorithm.kl.place").problem(
            f"true given with estimator {kl.estimator} and place {kl.place}; the ratio mends the gradient of k3 in the "
            "loss; write estimator: k3 and place: loss, or remove it"
        )
    if kl.sync_every is None and kl.sync_mix != 1:
        yield Keys("algorithm.kl.sync_mix", "algorithm.kl.sync_every").problem(
            f"{kl.sync_mix:g} given without algorithm.kl.sync_every; the reference would never move; add it"
        )
    if kl.sync_every is not None and recipe.train.strategy == "deepspeed":
        yield Keys("algorithm.kl.sync_every", "train.strategy").problem(
            f"{kl.sync_every} given with train.strategy deepspeed, whose ranks hold parts of each adapter; write "
            "train.strategy: fsdp2, or remove it"
        )


def _kept_start(recipe: GrpoRecipe) -> Problems:
    """Check a reference that is a copy of weights, which it is if they are trained whole."""
    kl, whole = recipe.algorithm.kl, ", ".join(whole_parts(recipe))
    if recipe.train.strategy == "deepspeed":
        yield Keys("algorithm.kl.coef", "train.strategy").problem(
            f"{kl.coef:g} given with train.strategy deepspeed, whose ranks hold parts of each weight, and {whole} "
            "trained whole: the penalty compares with a copy of it; write train.strategy: fsdp2, or "
            "algorithm.kl.coef: 0"
        )
    if kl.sync_every is not None:
        yield Keys("algorithm.kl.sync_every", "lora", "freeze").problem(
            f"{kl.sync_every} given with {whole} trained whole; only an adapter's reference moves; remove it, or "
            "train by lora alone"
        )


def _resampling(recipe: GrpoRecipe) -> Problems:
    tries = recipe.rollout.resample_tries
    if tries and recipe.rollout.lookahead:
        yield Keys("rollout.resample_tries", "rollout.lookahead").problem(
            f"{tries} given with rollout.lookahead {recipe.rollout.lookahead}; completions sampled ahead are not "
            "yet scored; write 0 for one of them"
        )
    if tries and recipe.rollout.group_size == 1:
        yield Keys("rollout.resample_tries", "rollout.group_size").problem(
            f"{tries} given with rollout.group_size 1; the rewards of a single completion never differ; write 0"
        )


ALGORITHM_RULES: tuple[Callable[[GrpoRecipe], Problems], ...] = (
    _minibatches,
    _group_size,
    _truncated_sampling,
    _resampling,
    _own_functions,
    _loss,
    _advantage,
    _correction,
    _reference,
)

"""Check that the losses, advantages, penalties and ways of sampling of a recipe make sense together.

What a loss or an advantage needs and reads is in its table in tiercel/algorithms; the rules here look it up there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tiercel.algorithms.advantages import ADVANTAGES, OwnAdvantage, advantage_of
from tiercel.algorithms.losses import LOSSES, LossKeys, OwnLoss
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.surrogates import SURROGATES, SurrogateKeys
from tiercel.config.conflicts.rewards import TELLS_RIGHT, tells_right
from tiercel.config.conflicts.table import conflict
from tiercel.config.schema import Algorithm, GrpoRecipe
from tiercel.config.trained_parts import keeps_start, whole_parts
from tiercel.config_base import Keys, Problems, shown
from tiercel.user_functions import CALL_FORM, is_call


def updates_per_rollout(recipe: GrpoRecipe) -> int:
    """Return how many optimiser updates a step has."""
    return recipe.optim.minibatches * recipe.optim.rollout_epochs


def _groups(recipe: GrpoRecipe) -> Problems:
    """Refuse updates of parts of groups, and groups without anything to compare."""
    prompts, minibatches = recipe.optim.prompts_per_step, recipe.optim.minibatches
    if prompts % minibatches:
        divisors = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        yield conflict("minibatches", minibatches, prompts, ", ".join(divisors))
    advantage = recipe.algorithm.advantage
    if recipe.rollout.group_size > 1 or not recipe.learns_from_rewards:
        return
    if advantage_of(advantage).least_group > 1:
        alone = next(name for name, each in ADVANTAGES.items() if each.least_group == 1)
        remedy = f"algorithm.advantage: {alone}" if isinstance(advantage, str) else "algorithm.advantage.least_group: 1"
        yield conflict("group_size", remedy)
    elif prompts == 1 and isinstance(advantage, str):
        yield conflict("prompts_per_step", advantage)


def _truncated_sampling(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    if cause := next(iter(recipe.optim.changed("minibatches", "rollout_epochs")), None):
        for key in rollout.changed("top_p", "top_k"):
            full, updates = 1 if key == "top_p" else 0, getattr(recipe.optim, cause)
            yield conflict("truncated sampling", key, cause, getattr(rollout, key), updates, full)


def _correction(recipe: GrpoRecipe) -> Problems:
    rollout, correction = recipe.rollout, recipe.algorithm.correction
    if rollout.lookahead and rollout.engine == "vllm-server" and correction.level == "none":
        yield conflict("level and lookahead", rollout.lookahead)
    if correction.level == "none":
        for key in correction.changed("floor", "mode", "cap"):
            yield conflict("key of a correction", key, getattr(correction, key))
    for key in rollout.changed("top_p", "top_k"):
        if correction.level != "none":
            yield conflict("correction of truncated sampling", key, getattr(rollout, key))
        elif recipe.algorithm.off_policy_delta is not None:
            yield conflict("off_policy_delta of truncated sampling", key, getattr(rollout, key))
    shared = _shared_gradient(recipe.algorithm)
    if correction.level == "token" and shared is not None:
        yield conflict("level and one ratio", shared.given, shared.remedy)


PARTS = ("algorithm.loss", "algorithm.ratio", "algorithm.surrogate")


def _loss(recipe: GrpoRecipe) -> Problems:
    algorithm = recipe.algorithm
    for key, own in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
        if isinstance(own, OwnLoss | OwnAdvantage) and not is_call(own.call):
            yield conflict("no function of yours", key, shown(own.call), CALL_FORM)
    yield from _parts(algorithm)
    yield from _unread_keys(algorithm)
    if algorithm.delta is not None and algorithm.clip_high is not None and algorithm.delta <= 1 + algorithm.clip_high:
        yield conflict("delta", algorithm.delta, 1 + algorithm.clip_high)
    if algorithm.entropy_mean != "loss" and algorithm.entropy_coef == 0:
        yield conflict("entropy_mean", algorithm.entropy_mean)
    if algorithm.top_entropy_of != "learnt" and algorithm.top_entropy == 1:
        yield conflict("top_entropy_of", algorithm.top_entropy_of)
    shared = _shared_gradient(algorithm)
    if algorithm.top_entropy < 1 and shared is not None:
        yield conflict("top_entropy and one gradient", algorithm.top_entropy, shared.given, shared.remedy)


def _parts(keys: LossKeys) -> Problems:
    """Check a ratio and a surrogate that the recipe names separately from the loss."""
    parts = keys.parts
    if parts is None:
        for name in keys.changed("ratio", "surrogate"):
            yield conflict("part beside a loss of your own", name, getattr(keys, name))
        return
    equal = next((name for name, each in RATIOS.items() if each.by_token == parts.ratio), None)
    if equal is not None and not SURROGATES[parts.surrogate].learns_by_ratio:
        yield Keys("algorithm.ratio" if keys.ratio else "algorithm.surrogate", *PARTS).problem(
            f"is {keys.ratio or keys.surrogate}, but the surrogate {parts.surrogate} uses the ratio without its "
            f"gradient, so {parts.ratio} would be the same as {equal}; set algorithm.ratio: {equal}"
        )


def _unread_keys(algorithm: Algorithm) -> Problems:
    """Refuse bounds and gates that the loss does not read."""
    parts = algorithm.parts
    reads: tuple[str, ...] = ()
    given = "a loss of your own"
    if parts is not None:
        reads = SURROGATES[parts.surrogate].reads
        given = f"algorithm.surrogate {parts.surrogate}" if algorithm.surrogate else f"algorithm.loss {algorithm.loss}"
    for name in algorithm.changed(*(name for name in SurrogateKeys.model_fields if name not in reads)):
        value = getattr(algorithm, name)
        yield conflict("key that no part reads", name, "null" if value is None else f"{value:g}", given)


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
        yield conflict("scale", algorithm.scale, algorithm.advantage)
    k, size = algorithm.pass_k, recipe.rollout.group_size
    if advantage.needs_pass_k and k is None:
        yield conflict("pass_k required", algorithm.advantage)
    elif advantage.needs_pass_k and k is not None and k >= size > 1:
        yield conflict("pass_k and group_size", k, size)
    elif not advantage.needs_pass_k and k is not None and isinstance(algorithm.advantage, str):
        reader = next(name for name, each in ADVANTAGES.items() if each.needs_pass_k)
        yield conflict("pass_k without reader", k, algorithm.advantage, reader)
    if advantage.depends_on == "right" and not any(tells_right(reward) for reward in recipe.rewards):
        yield conflict("advantage", algorithm.advantage, ", ".join(TELLS_RIGHT))


def _reference(recipe: GrpoRecipe) -> Problems:
    kl = recipe.algorithm.kl
    if kl.coef == 0:
        for name in kl.changed("place", "by_ratio", "sync_every", "sync_mix", "estimator"):
            yield conflict("key without a reference", name, shown(getattr(kl, name)).strip('"'))
        return
    if keeps_start(recipe):  # a copy of the weights that are trained whole
        whole = ", ".join(whole_parts(recipe))
        if recipe.train.strategy == "deepspeed":
            yield conflict("coef", kl.coef, whole)
        if kl.sync_every is not None:
            yield conflict("sync_every and lora", kl.sync_every, whole)
    if kl.estimator == "k1" and kl.place == "loss":
        yield conflict("estimator")
    if kl.place == "reward" and advantage_of(recipe.algorithm.advantage).depends_on in ("rewards", "right"):
        yield conflict("place", recipe.algorithm.advantage)
    if kl.by_ratio and (kl.place, kl.estimator) != ("loss", "k3"):
        yield conflict("by_ratio", kl.estimator, kl.place)
    if kl.sync_every is None and kl.sync_mix != 1:
        yield conflict("sync_mix", kl.sync_mix)
    if kl.sync_every is not None and recipe.train.strategy == "deepspeed":
        yield conflict("sync_every and strategy", kl.sync_every)


def _resampling(recipe: GrpoRecipe) -> Problems:
    tries = recipe.rollout.resample_tries
    if tries and recipe.rollout.lookahead:
        yield conflict("resample_tries and lookahead", tries, recipe.rollout.lookahead)
    if tries and recipe.rollout.group_size == 1:
        yield conflict("resample_tries and group_size", tries)


ALGORITHM_RULES: tuple[Callable[[GrpoRecipe], Problems], ...] = (
    _groups,
    _truncated_sampling,
    _resampling,
    _loss,
    _advantage,
    _correction,
    _reference,
)

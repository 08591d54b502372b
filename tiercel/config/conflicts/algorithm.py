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
from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.schema import Algorithm, GrpoRecipe
from tiercel.config_base import Keys, Problems, shown
from tiercel.user_functions import CALL_FORM, is_call

DEFAULTS = Algorithm()


def updates_per_rollout(recipe: GrpoRecipe) -> int:
    """Return how many optimiser updates a step has."""
    return recipe.optim.minibatches * recipe.optim.rollout_epochs


def _minibatches(recipe: GrpoRecipe) -> Problems:
    prompts, minibatches = recipe.optim.prompts_per_step, recipe.optim.minibatches
    if prompts % minibatches:
        divisors = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        yield Keys("optim.minibatches", "optim.prompts_per_step").problem(
            f"is {minibatches}, but must divide optim.prompts_per_step ({prompts}), because groups are not split "
            f"between updates; use one of {', '.join(divisors)}"
        )


def _group_size(recipe: GrpoRecipe) -> Problems:
    advantage = recipe.algorithm.advantage
    if recipe.rollout.group_size > 1 or not recipe.learns_from_rewards:
        return
    if advantage_of(advantage).least_group > 1:
        alone = next(name for name, each in ADVANTAGES.items() if each.least_group == 1)
        remedy = f"algorithm.advantage: {alone}" if isinstance(advantage, str) else "algorithm.advantage.least_group: 1"
        yield Keys("rollout.group_size", "algorithm.advantage").problem(
            "is 1, but the advantage of a single completion is undefined, because its reward minus the group mean is "
            f"always 0; use 2 or more, or set {remedy}"
        )
    elif recipe.optim.prompts_per_step == 1 and isinstance(advantage, str):
        yield Keys("optim.prompts_per_step", "rollout.group_size").problem(
            f"is 1, and so is rollout.group_size, but {advantage} compares the completions of a step, and there "
            "would be only one; use 2 or more"
        )


def _truncated_sampling(recipe: GrpoRecipe) -> Problems:
    rollout, updates = recipe.rollout, updates_per_rollout(recipe)
    cuts = {"rollout.top_p": (rollout.top_p, rollout.top_p < 1), "rollout.top_k": (rollout.top_k, rollout.top_k > 0)}
    for key, (value, is_cut) in cuts.items():
        if is_cut and updates > 1:
            cause = "minibatches" if recipe.optim.minibatches > 1 else "rollout_epochs"
            full = 1 if key == "rollout.top_p" else 0
            yield Keys(key, f"optim.{cause}").problem(
                f"is {value}, but optim.{cause} is {getattr(recipe.optim, cause)}, and the ratio of new to old "
                f"policy is not defined for tokens that truncated sampling removes; set {key}: {full}, or "
                f"optim.{cause}: 1"
            )


def _correction(recipe: GrpoRecipe) -> Problems:
    rollout, correction = recipe.rollout, recipe.algorithm.correction
    if rollout.lookahead and rollout.engine == "vllm-server" and correction.level == "none":
        yield Keys("algorithm.correction.level", "rollout.lookahead").problem(
            f"is none, but with rollout.lookahead {rollout.lookahead}, an older policy samples the completions; use "
            "token or sequence"
        )
    if correction.floor is not None and correction.level == "none":
        yield Keys("algorithm.correction.floor", "algorithm.correction.level").problem(
            f"is {correction.floor:g}, but algorithm.correction.level is none, which computes no ratio; set it to "
            "token or sequence, or remove this key"
        )
    for key, is_cut in (("rollout.top_p", rollout.top_p < 1), ("rollout.top_k", rollout.top_k > 0)):
        value = rollout.top_p if key == "rollout.top_p" else rollout.top_k
        cause = "algorithm.correction" if correction.level != "none" else "algorithm.off_policy_delta"
        if is_cut and (correction.level != "none" or recipe.algorithm.off_policy_delta is not None):
            yield Keys(key, f"{cause}.level" if cause == "algorithm.correction" else cause).problem(
                f"is {value}, but {cause} is set, and the engine's probabilities are computed after truncation, the "
                f"learner's before it; remove this key, or set {cause}{_OFF[cause]}"
            )
    shared = _shared_gradient(recipe.algorithm)
    if correction.level == "token" and shared is not None:
        yield Keys("algorithm.correction.level", *PARTS).problem(
            f"is token, but with {shared.given}, all tokens of a completion share one ratio; use sequence, or set "
            f"{shared.remedy}"
        )


_OFF = {"algorithm.correction": ".level: none", "algorithm.off_policy_delta": ": null"}
PARTS = ("algorithm.loss", "algorithm.ratio", "algorithm.surrogate")


def _own_functions(recipe: GrpoRecipe) -> Problems:
    for key in ("loss", "advantage"):
        own = getattr(recipe.algorithm, key)
        if isinstance(own, OwnLoss | OwnAdvantage) and not is_call(own.call):
            yield Keys(f"algorithm.{key}.call").problem(f"is {shown(own.call)}, but must be {CALL_FORM}")


def _loss(recipe: GrpoRecipe) -> Problems:
    algorithm = recipe.algorithm
    yield from _parts(algorithm)
    yield from _unread_keys(algorithm)
    if algorithm.delta is not None and algorithm.clip_high is not None and algorithm.delta <= 1 + algorithm.clip_high:
        yield Keys("algorithm.delta", "algorithm.clip_high").problem(
            f"is {algorithm.delta:g}, but must be above 1 + algorithm.clip_high = {1 + algorithm.clip_high:g}, "
            "because it bounds ratios beyond the upper clip; use a larger value, such as 4"
        )
    yield from _entropy(algorithm)
    shared = _shared_gradient(algorithm)
    if algorithm.top_entropy < 1 and shared is not None:
        yield Keys("algorithm.top_entropy", *PARTS).problem(
            f"is {algorithm.top_entropy:g}, but with {shared.given}, all tokens of a completion share one gradient; "
            f"set {shared.remedy}"
        )


def _entropy(algorithm: Algorithm) -> Problems:
    """Refuse keys that belong to an entropy term or to a share of tokens by entropy if the recipe has none."""
    if algorithm.entropy_mean != "loss" and algorithm.entropy_coef == 0:
        yield Keys("algorithm.entropy_mean", "algorithm.entropy_coef").problem(
            f"is {algorithm.entropy_mean}, but algorithm.entropy_coef is 0; set a coefficient, such as 0.001, or "
            "remove this key"
        )
    if algorithm.top_entropy_of != "learnt" and algorithm.top_entropy == 1:
        yield Keys("algorithm.top_entropy_of", "algorithm.top_entropy").problem(
            f"is {algorithm.top_entropy_of}, but algorithm.top_entropy is 1; set a fraction, such as 0.2, or remove "
            "this key"
        )


def _parts(keys: LossKeys) -> Problems:
    """Check a ratio and a surrogate that the recipe names separately from the loss."""
    parts = keys.parts
    if parts is None:
        for name in ("ratio", "surrogate"):
            if getattr(keys, name) is not None:
                yield Keys(f"algorithm.{name}", "algorithm.loss").problem(
                    f"is {getattr(keys, name)}, but a loss of your own does not use it; remove this key"
                )
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
    for name in SurrogateKeys.model_fields:
        value = getattr(algorithm, name)
        if name not in reads and value != getattr(DEFAULTS, name):
            yield Keys(f"algorithm.{name}", "algorithm.loss", "algorithm.surrogate").problem(
                f"is {'null' if value is None else f'{value:g}'}, but {given} does not use it; remove this key"
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
            f"is {algorithm.scale}, but algorithm.advantage {algorithm.advantage} has a scale of its own; remove "
            "this key"
        )
    if advantage.needs_pass_k:
        yield from _pass_k(recipe)
    elif algorithm.pass_k is not None and isinstance(algorithm.advantage, str):
        reader = next(name for name, each in ADVANTAGES.items() if each.needs_pass_k)
        yield Keys("algorithm.pass_k", "algorithm.advantage").problem(
            f"is {algorithm.pass_k}, but algorithm.advantage {algorithm.advantage} does not use it; set "
            f"algorithm.advantage: {reader}, or remove this key"
        )
    if advantage.depends_on == "right" and not any(tells_right(reward) for reward in recipe.rewards):
        yield Keys("algorithm.advantage", "rewards").problem(
            f"is {algorithm.advantage}, but no reward tells right completions from wrong ones; set correct_at for "
            f"one of them, or add one of {', '.join(TELLS_RIGHT)}"
        )


def _pass_k(recipe: GrpoRecipe) -> Problems:
    k, size = recipe.algorithm.pass_k, recipe.rollout.group_size
    if k is None:
        yield Keys("algorithm.pass_k", "algorithm.advantage").problem(
            f"is required by algorithm.advantage {recipe.algorithm.advantage}; set the number of tries of which one "
            "must be right, such as 4"
        )
    elif k >= size > 1:
        yield Keys("algorithm.pass_k", "rollout.group_size").problem(
            f"is {k}, but must be below rollout.group_size ({size}), because {k} completions of a group are drawn"
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
                    f"is {value}, but algorithm.kl.coef is 0, so there is no reference; set a coefficient, such as "
                    "0.04, or remove this key"
                )
        return
    if keeps_start(recipe):
        yield from _kept_start(recipe)
    if kl.estimator == "k1" and kl.place == "loss":
        yield Keys("algorithm.kl.estimator", "algorithm.kl.place").problem(
            "is k1, but algorithm.kl.place is loss, where the gradient of k1 averages to 0 and would only add noise; "
            "use k2 or k3, or set algorithm.kl.place: reward"
        )
    if kl.place == "reward" and advantage_of(recipe.algorithm.advantage).depends_on in ("rewards", "right"):
        yield Keys("algorithm.kl.place", "algorithm.advantage").problem(
            f"is reward, but algorithm.advantage {recipe.algorithm.advantage} does not use the sum of the rewards, "
            "from which the penalty is subtracted; use loss"
        )
    if kl.by_ratio and (kl.place, kl.estimator) != ("loss", "k3"):
        yield Keys("algorithm.kl.by_ratio", "algorithm.kl.estimator", "algorithm.kl.place").problem(
            f"is true, but algorithm.kl.estimator is {kl.estimator} and algorithm.kl.place is {kl.place}, and the "
            "ratio corrects only the gradient of k3 in the loss; set them to k3 and loss, or remove this key"
        )
    if kl.sync_every is None and kl.sync_mix != 1:
        yield Keys("algorithm.kl.sync_mix", "algorithm.kl.sync_every").problem(
            f"is {kl.sync_mix:g}, but algorithm.kl.sync_every is not set, so the reference would never move; set "
            "algorithm.kl.sync_every"
        )
    if kl.sync_every is not None and recipe.train.strategy == "deepspeed":
        yield Keys("algorithm.kl.sync_every", "train.strategy").problem(
            f"is {kl.sync_every}, but with train.strategy deepspeed, each rank holds only a part of each adapter; "
            "set train.strategy: fsdp2, or remove this key"
        )


def _kept_start(recipe: GrpoRecipe) -> Problems:
    """Check a reference that is a copy of weights, which it is if they are trained whole."""
    kl, whole = recipe.algorithm.kl, ", ".join(whole_parts(recipe))
    if recipe.train.strategy == "deepspeed":
        yield Keys("algorithm.kl.coef", "train.strategy").problem(
            f"is {kl.coef:g}, so the penalty needs a copy of {whole}, which this recipe trains whole; but with "
            "train.strategy deepspeed, each rank holds only a part of each weight; set train.strategy: fsdp2, or use "
            "0"
        )
    if kl.sync_every is not None:
        yield Keys("algorithm.kl.sync_every", "lora", "freeze").problem(
            f"is {kl.sync_every}, but this recipe trains {whole} whole, and only the reference of an adapter can "
            "move; remove this key, or train with lora only"
        )


def _resampling(recipe: GrpoRecipe) -> Problems:
    tries = recipe.rollout.resample_tries
    if tries and recipe.rollout.lookahead:
        yield Keys("rollout.resample_tries", "rollout.lookahead").problem(
            f"is {tries}, but rollout.lookahead is {recipe.rollout.lookahead}, and completions that are sampled "
            "ahead are not scored yet; set one of the two to 0"
        )
    if tries and recipe.rollout.group_size == 1:
        yield Keys("rollout.resample_tries", "rollout.group_size").problem(
            f"is {tries}, but rollout.group_size is 1, and the rewards of a single completion never differ; use 0"
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

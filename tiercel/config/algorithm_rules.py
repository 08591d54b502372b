"""Judgements on the algorithm: which losses, advantages, penalties and ways of sampling make sense together."""

from collections.abc import Callable

from tiercel.config.parts import keeps_start, whole_parts
from tiercel.config.problems import Problem, Problems
from tiercel.config.reward_rules import TELLS_RIGHT, tells_right
from tiercel.config.schema import Algorithm, GrpoRecipe

FIXED_SCALE = ("reinforce_pp", "reinforce_pp_baseline", "gdpo", "pass_k")
WITHOUT_GROUP = ("reinforce_pp",)
NOT_OF_THE_SUM = ("gdpo", "pass_k")  # advantages that do not look at the weighted sum of the rewards
DEFAULTS = Algorithm()


def updates_per_rollout(recipe: GrpoRecipe) -> int:
    return recipe.optim.minibatches * recipe.optim.rollout_epochs


def _minibatches(recipe: GrpoRecipe) -> Problems:
    prompts, minibatches = recipe.optim.prompts_per_step, recipe.optim.minibatches
    if prompts % minibatches:
        divisors = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        yield Problem(
            key="optim.minibatches",
            text=f"{minibatches} given; must divide optim.prompts_per_step ({prompts}), for groups are not split "
            f"between updates; write one of {', '.join(divisors)}",
            also=("optim.prompts_per_step",),
        )


def _group_size(recipe: GrpoRecipe) -> Problems:
    advantage, size = recipe.algorithm.advantage, recipe.rollout.group_size
    if size > 1:
        return
    if advantage not in WITHOUT_GROUP:
        yield Problem(
            key="rollout.group_size",
            text="1 given; the advantage of a single completion is undefined, for reward - group mean is always 0; "
            f"write 2 or more, or algorithm.advantage: {WITHOUT_GROUP[0]}",
            also=("algorithm.advantage",),
        )
    elif recipe.optim.prompts_per_step == 1:
        yield Problem(
            key="optim.prompts_per_step",
            text=f"1 given with rollout.group_size 1; {advantage} compares the completions of a step, of which there "
            "would be one; write 2 or more",
            also=("rollout.group_size",),
        )


def _truncated_sampling(recipe: GrpoRecipe) -> Problems:
    rollout, updates = recipe.rollout, updates_per_rollout(recipe)
    cuts = {"rollout.top_p": (rollout.top_p, rollout.top_p < 1), "rollout.top_k": (rollout.top_k, rollout.top_k > 0)}
    for key, (value, is_cut) in cuts.items():
        if is_cut and updates > 1:
            cause = "minibatches" if recipe.optim.minibatches > 1 else "rollout_epochs"
            full = 1 if key == "rollout.top_p" else 0
            yield Problem(
                key=key,
                text=f"{value} given with optim.{cause} {getattr(recipe.optim, cause)}; the ratio of new to old policy "
                f"is not defined for tokens that the cut removes; write {key}: {full}, or optim.{cause}: 1",
                also=(f"optim.{cause}",),
            )


def _correction(recipe: GrpoRecipe) -> Problems:
    rollout, correction = recipe.rollout, recipe.algorithm.correction
    if rollout.lookahead and rollout.engine == "vllm-server" and correction.level == "none":
        yield Problem(
            key="algorithm.correction.level",
            text=f"none given with rollout.lookahead {rollout.lookahead}, whose completions an older policy drew; "
            "write token or sequence",
            also=("rollout.lookahead",),
        )
    for key, is_cut in (("rollout.top_p", rollout.top_p < 1), ("rollout.top_k", rollout.top_k > 0)):
        value = rollout.top_p if key == "rollout.top_p" else rollout.top_k
        cause = "algorithm.correction" if correction.level != "none" else "algorithm.off_policy_delta"
        if is_cut and (correction.level != "none" or recipe.algorithm.off_policy_delta is not None):
            yield Problem(
                key=key,
                text=f"{value} given with {cause}; an engine's probabilities are those after the cut, the learner's "
                f"those before it; leave it out, or write {cause}{_OFF[cause]}",
                also=(f"{cause}.level" if cause == "algorithm.correction" else cause,),
            )
    if correction.level == "token" and recipe.algorithm.loss == "gspo":
        yield Problem(
            key="algorithm.correction.level",
            text="token given with algorithm.loss gspo, whose tokens share one ratio; write sequence, or "
            "algorithm.loss: gspo_token",
            also=("algorithm.loss",),
        )


_OFF = {"algorithm.correction": ".level: none", "algorithm.off_policy_delta": ": null"}


def _loss(recipe: GrpoRecipe) -> Problems:
    """Bounds that the loss reads."""
    algorithm = recipe.algorithm
    loss = algorithm.loss
    readers = {
        "clip_low": loss != "sapo",
        "clip_high": loss != "sapo",
        "delta": loss not in ("sapo", "cispo"),
        "gate_positive": loss == "sapo",
        "gate_negative": loss == "sapo",
    }
    for name, is_read in readers.items():
        value = getattr(algorithm, name)
        if not is_read and value != getattr(DEFAULTS, name):
            yield Problem(
                key=f"algorithm.{name}",
                text=f"{'null' if value is None else f'{value:g}'} given with algorithm.loss {loss}, which does not "
                "read it; remove it",
                also=("algorithm.loss",),
            )
    if algorithm.delta is not None and algorithm.clip_high is not None and algorithm.delta <= 1 + algorithm.clip_high:
        yield Problem(
            key="algorithm.delta",
            text=f"{algorithm.delta:g} given, not above 1 + algorithm.clip_high = {1 + algorithm.clip_high:g}; it "
            "bounds what the upper clip leaves; write a larger one, such as 4",
            also=("algorithm.clip_high",),
        )
    if algorithm.top_entropy < 1 and loss == "gspo":
        yield Problem(
            key="algorithm.top_entropy",
            text=f"{algorithm.top_entropy:g} given with algorithm.loss gspo, whose tokens share one gradient; write "
            "algorithm.loss: gspo_token",
            also=("algorithm.loss",),
        )


def _advantage(recipe: GrpoRecipe) -> Problems:
    algorithm = recipe.algorithm
    if algorithm.scale is not None and algorithm.advantage in FIXED_SCALE:
        yield Problem(
            key="algorithm.scale",
            text=f"{algorithm.scale} given with algorithm.advantage {algorithm.advantage}, which has a scale of its "
            "own; remove it",
            also=("algorithm.advantage",),
        )
    if algorithm.advantage == "pass_k":
        yield from _pass_k(recipe)
    elif algorithm.pass_k is not None:
        yield Problem(
            key="algorithm.pass_k",
            text=f"{algorithm.pass_k} given with algorithm.advantage {algorithm.advantage}, which does not read it; "
            "write algorithm.advantage: pass_k, or remove it",
            also=("algorithm.advantage",),
        )


def _pass_k(recipe: GrpoRecipe) -> Problems:
    k, size = recipe.algorithm.pass_k, recipe.rollout.group_size
    if k is None:
        yield Problem(
            key="algorithm.pass_k",
            text="missing; algorithm.advantage pass_k needs the number of tries of which one need be right, such as 4",
            also=("algorithm.advantage",),
        )
    elif k >= size > 1:
        yield Problem(
            key="algorithm.pass_k",
            text=f"{k} given; must be below rollout.group_size ({size}), of which draws of {k} are taken",
            also=("rollout.group_size",),
        )
    if not any(tells_right(reward) for reward in recipe.rewards):
        yield Problem(
            key="algorithm.advantage",
            text="pass_k given, but no reward tells right from wrong; give one of them a correct_at, or take one of "
            f"{', '.join(TELLS_RIGHT)}",
            also=("rewards",),
        )


def _reference(recipe: GrpoRecipe) -> Problems:
    kl = recipe.algorithm.kl
    if kl.coef == 0:
        for name, value, is_given in (
            ("place", kl.place, kl.place != "loss"),
            ("sync_every", kl.sync_every, kl.sync_every is not None),
        ):
            if is_given:
                yield Problem(
                    key=f"algorithm.kl.{name}",
                    text=f"{value} given with algorithm.kl.coef 0, which has no reference; write a coef, such as 0.04, "
                    "or remove it",
                    also=("algorithm.kl.coef",),
                )
        return
    if keeps_start(recipe):
        yield from _kept_start(recipe)
    if kl.estimator == "k1" and kl.place == "loss":
        yield Problem(
            key="algorithm.kl.estimator",
            text="k1 given with algorithm.kl.place loss; its gradient averages to 0, so it would only add noise; write "
            "k2 or k3, or algorithm.kl.place: reward",
            also=("algorithm.kl.place",),
        )
    if kl.place == "reward" and recipe.algorithm.advantage in NOT_OF_THE_SUM:
        yield Problem(
            key="algorithm.kl.place",
            text=f"reward given with algorithm.advantage {recipe.algorithm.advantage}, which does not look at the sum "
            "of the rewards that the penalty is taken off; write loss",
            also=("algorithm.advantage",),
        )
    if kl.sync_every is None and kl.sync_mix != 1:
        yield Problem(
            key="algorithm.kl.sync_mix",
            text=f"{kl.sync_mix:g} given without algorithm.kl.sync_every; the reference would never move; add it",
            also=("algorithm.kl.sync_every",),
        )
    if kl.sync_every is not None and recipe.train.strategy == "deepspeed":
        yield Problem(
            key="algorithm.kl.sync_every",
            text=f"{kl.sync_every} given with train.strategy deepspeed, whose ranks hold parts of each adapter; write "
            "train.strategy: fsdp2, or remove it",
            also=("train.strategy",),
        )


def _kept_start(recipe: GrpoRecipe) -> Problems:
    """The copy of weights that are trained whole."""
    kl, whole = recipe.algorithm.kl, ", ".join(whole_parts(recipe))
    if recipe.train.strategy == "deepspeed":
        yield Problem(
            key="algorithm.kl.coef",
            text=f"{kl.coef:g} given with train.strategy deepspeed, whose ranks hold parts of each weight, and {whole} "
            "trained whole: the penalty compares with a copy of it; write train.strategy: fsdp2, or "
            "algorithm.kl.coef: 0",
            also=("train.strategy",),
        )
    if kl.sync_every is not None:
        yield Problem(
            key="algorithm.kl.sync_every",
            text=f"{kl.sync_every} given with {whole} trained whole; only an adapter's reference moves; remove it, or "
            "train by lora alone",
            also=("lora", "freeze"),
        )


def _resampling(recipe: GrpoRecipe) -> Problems:
    tries = recipe.rollout.resample_tries
    if tries and recipe.rollout.lookahead:
        yield Problem(
            key="rollout.resample_tries",
            text=f"{tries} given with rollout.lookahead {recipe.rollout.lookahead}; completions sampled ahead are not "
            "yet scored; write 0 for one of them",
            also=("rollout.lookahead",),
        )
    if tries and recipe.rollout.group_size == 1:
        yield Problem(
            key="rollout.resample_tries",
            text=f"{tries} given with rollout.group_size 1; the rewards of a single completion never differ; write 0",
            also=("rollout.group_size",),
        )


ALGORITHM_RULES: tuple[Callable[[GrpoRecipe], Problems], ...] = (
    _minibatches,
    _group_size,
    _truncated_sampling,
    _resampling,
    _loss,
    _advantage,
    _correction,
    _reference,
)

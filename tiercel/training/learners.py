"""Learners: a policy in the recipe's form, for training and for passes alone."""

from collections.abc import Callable

import torch

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.distributed.context import ContextGroup
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.errors import ModelError
from tiercel.learner.compiling import chosen_backend
from tiercel.learner.flex_check import flex_obstacle
from tiercel.learner.forms import chosen_form
from tiercel.learner.learner import Learner
from tiercel.models.delta_net import rule_in_use
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.planning.frozen_models import tokens_without_gradient
from tiercel.training.forward import Passes

Say = Callable[[str], None]


def passes_for_inference(policy: Policy, recipe: BaseRecipe, ranks: Ranks = ALONE) -> Passes:
    """Wrap a policy that was loaded for inference; each rank holds it whole."""
    return Passes(
        policy=policy,
        learner=new_learner(policy, recipe, policy.device).eval(),
        vision=VisionStore(policy, 0),
        ranks=ranks,
        passes_are_private=True,
        temperature=learning_temperature(recipe),
        max_tokens=tokens_without_gradient(recipe),
    )


def new_learner(
    policy: Policy,
    recipe: BaseRecipe,
    device: torch.device,
    say: Say = lambda text: None,
    strategy: StrategyKind = STRATEGY_KINDS["single"],
    context: ContextGroup | None = None,
) -> Learner:
    """Make the learner of the recipe's form, or of the one that the policy and the device admit. `context`: the ranks
    that compute its packs together."""
    language_model = policy.family.language_model(policy.model)
    obstacle = policy.family.sharing_obstacle(language_model.config)
    if rule := rule_in_use(language_model, device):
        say(f"delta nets: computed by {rule}")
    form = chosen_form(recipe.learner.form, device, obstacle, in_parts=context is not None)
    if obstacle:
        say(f"learner.form: repeated, each completion with a prompt of its own: this model cannot share, {obstacle}")
    if form == "flex" and device.type == "cuda":
        form = _form_that_fits(policy, recipe, device, say)
    backend = chosen_backend(recipe, strategy, form, device, say)
    return Learner(policy, form, recipe.learner.gradient_checkpointing, backend, context)


def learning_temperature(recipe: BaseRecipe) -> float:
    """Return the temperature that logits are divided by: in GRPO that of sampling, in SFT 1."""
    return recipe.rollout.temperature if isinstance(recipe, GrpoRecipe) else 1.0


def _form_that_fits(policy: Policy, recipe: BaseRecipe, device: torch.device, say: Say) -> str:
    """Return flex; or dense, if flex was not asked for and the GPU cannot run its kernels. Raises ModelError if it was
    asked for."""
    config = policy.family.language_model(policy.model).config
    learns = any(parameter.requires_grad for parameter in policy.model.parameters())
    obstacle = flex_obstacle(config, policy.compute_dtype, device, learns=learns)
    if obstacle is None:
        return "flex"
    if recipe.learner.form == "flex":
        raise ModelError(f"learner.form: flex {obstacle}; write learner.form: dense")
    say(f"learner.form: dense, whose memory grows with the square of a row's length: flex {obstacle}")
    return "dense"

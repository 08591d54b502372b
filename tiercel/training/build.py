"""The trainer of a run: policy, learner and optimiser, as new or as a checkpoint left them."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from tiercel.algorithms.kl import KlTerm
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.distributed.strategy import Strategy, build_strategy
from tiercel.errors import ModelError
from tiercel.learner.compiling import chosen_backend, require_compilable
from tiercel.learner.forms import chosen_form
from tiercel.learner.learner import Learner
from tiercel.learner.proof import prove_where_needed
from tiercel.models.delta_net import rule_in_use
from tiercel.models.family import Family
from tiercel.models.loading import read_tensors
from tiercel.models.memory_errors import weight_bytes
from tiercel.models.policy import Policy, build_policy, load_for_inference, starting_weights
from tiercel.models.reference import restore_reference
from tiercel.models.saving import restore_adapter
from tiercel.models.vision import VisionStore
from tiercel.planning.frozen_models import tokens_without_gradient
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.waiting import waiting
from tiercel.training.budget import with_tokens
from tiercel.training.forward import Passes
from tiercel.training.served_teacher import ServedTeacher, open_served, recipe_of_teacher
from tiercel.training.strategy_choice import chosen_strategy
from tiercel.training.teaching import LocalTeacher, Teaching, require_same_words, teacher_encoder
from tiercel.training.trainer import Trainer

Say = Callable[[str], None]


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_trainer(
    recipe: BaseRecipe,
    found: FoundCheckpoint | None = None,
    say: Say = lambda text: None,
    ranks: Ranks = ALONE,
    tokens: int | None = None,
) -> Trainer:
    """Load or restore all that is trained. `say` hears what was chosen; `tokens`: of a microbatch, where the run has
    chosen them before (budget.py)."""
    device = training_device()
    ranks.pulse.begin("load", found.step if found else 0)
    weights = found.path / "model" if found and recipe.lora is None else None
    choice = chosen_strategy(recipe if tokens is None else with_tokens(recipe, tokens), ranks, device, say)
    kind = STRATEGY_KINDS[choice.strategy]
    require_compilable(recipe, kind)

    def load_and_wrap() -> tuple[Policy, Strategy]:
        policy = build_policy(recipe, device, weights, stays_on_cpu=kind.shards_model)
        prove_where_needed(policy, say)
        start = starting_weights(policy, recipe, weights)
        if found is not None and policy.peft is not None:
            restore_adapter(policy, found.path / "adapter")
            restore_reference(policy, found.path)
        learner = new_learner(policy, recipe, device, say, kind)
        return policy, build_strategy(kind.name, recipe, ranks, policy, learner, start)

    with waiting(say, f"loading {recipe.model.path}{_size_of(weights or Path(recipe.model.path).expanduser())}"):
        # A rank that shards holds the whole model while it does; in turns, a machine's memory holds it once.
        policy, strategy = ranks.in_turns(load_and_wrap) if kind.loads_in_turns else load_and_wrap()
    if found is not None:
        strategy.restore(read_tensors(found.path / "optimizer.safetensors"), found.state["loss_scaler"])
    trainer = Trainer(
        policy=policy,
        learner=strategy.learner,
        vision=VisionStore(policy, recipe.model.vision_cache_bytes),
        ranks=ranks,
        passes_are_private=strategy.passes_are_private,
        temperature=learning_temperature(recipe),
        max_tokens=choice.tokens,
        strategy=strategy,
        max_grad_norm=recipe.optim.max_grad_norm,
        kl=KlTerm.of(recipe.algorithm.kl) if isinstance(recipe, GrpoRecipe) else None,
        teacher=_teacher(recipe, policy.family, say, ranks) if isinstance(recipe, GrpoRecipe) else None,
    )
    trainer.learner.eval()
    if not strategy.passes_are_private:
        # FSDP2 takes the module that is called first for the root; the sampler must not be the one to call.
        with torch.no_grad():
            trainer.learner(trainer.empty_pass().packed, None, trainer.temperature)
    return trainer


def _teacher(recipe: GrpoRecipe, policy: Family, say: Say, ranks: Ranks) -> Teaching | None:
    """Load the teacher of the recipe; None where it has none. Raises ModelError where its tokenizer is another."""
    section = recipe.taught_by
    if section is None:
        return None
    chosen = recipe_of_teacher(recipe, section)
    told_by: LocalTeacher | ServedTeacher
    if section.url is not None:
        told_by = open_served(recipe, section, ranks)
        ranks.on_first(told_by.require_answer)
        family = told_by.family
    else:
        with waiting(say, f"loading the teacher {section.path}"):
            adapter = None if section.adapter is None else Path(section.adapter)
            model = load_for_inference(chosen, training_device(), adapter)
            prove_where_needed(model, say)
        family = model.family
        words = min(family.vocabulary_size, policy.vocabulary_size)
        told_by = LocalTeacher(section=section, passes=passes_for_inference(model, chosen, ranks), words=words)
    require_same_words(family, policy)
    encode = teacher_encoder(section, chosen.data, family, policy)
    if encode is not None and recipe.rollout.has_turns:
        raise ModelError(
            f"{section.path}: this teacher makes other tokens or pixels of a row than the policy, but turns with tools "
            "or an environment follow the policy's own prompt; take a teacher of the same family and processor"
        )
    return Teaching(section=section, told_by=told_by, encode=encode, ranks=ranks)


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
) -> Learner:
    """Make the learner of the recipe's form, or of the one that the policy and the device admit."""
    language_model = policy.family.language_model(policy.model)
    obstacle = policy.family.sharing_obstacle(language_model.config)
    if rule := rule_in_use(language_model, device):
        say(f"delta nets: computed by {rule}")
    form = chosen_form(recipe.learner.form, device, obstacle)
    if obstacle:
        say(f"learner.form: repeated, each completion with a prompt of its own: this model cannot share, {obstacle}")
    backend = chosen_backend(recipe, strategy, form, device, say)
    return Learner(policy, form, recipe.learner.gradient_checkpointing, backend)


def learning_temperature(recipe: BaseRecipe) -> float:
    """Return the temperature that logits are divided by: in GRPO that of sampling, in SFT 1."""
    return recipe.rollout.temperature if isinstance(recipe, GrpoRecipe) else 1.0


def _size_of(checkpoint: Path) -> str:
    """Write the size of a local checkpoint's weights for a message."""
    with suppress(OSError):  # who loads them says it
        return f", {weight_bytes(checkpoint) / 1e9:.1f} GB" if checkpoint.is_dir() else ""
    return ""

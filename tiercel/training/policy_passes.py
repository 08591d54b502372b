"""How packed tokens go through a policy.

N scored tokens of a microbatch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.config.schema import BaseRecipe, GrpoRecipe, SftRecipe
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind
from tiercel.distributed.context import ContextGroup, exchanged
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.errors import ModelError, RecipeError
from tiercel.models.families.base import Family
from tiercel.models.layers.delta_net import rule_in_use
from tiercel.models.layers.dropout import own_dropout
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.flex import flex_obstacle
from tiercel.packing.attention.prefix import PrefixCache, passes
from tiercel.packing.batch import (
    AdvantageGroup,
    MicrobatchUnit,
    PolicyBatch,
    TokenCounter,
    empty_item,
    empty_unit,
    policy_units,
)
from tiercel.packing.compiling import chosen_backend
from tiercel.packing.examples import ExampleBatch, ExampleGroup, example_units
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackedTokens, PackItem, pack
from tiercel.packing.logprobs import TokenScores
from tiercel.packing.pass_options import chosen_form
from tiercel.planning.frozen_models import tokens_without_gradient

T = TypeVar("T")
NO_TOTALS = Totals(tokens=0, completions=0, groups=0)  # for passes without a loss


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPasses:
    """A policy and how tokens go through it. All ranks call `units` and `example_units` together. Passes are private if
    a forward pass has no collectives; otherwise all ranks must make the same number of passes."""

    policy: Policy
    learner: PackedPolicy  # in a trainer, wrapped by the strategy
    vision: VisionStore
    ranks: Ranks
    passes_are_private: bool
    temperature: float
    max_tokens: int  # of a microbatch
    joins_rows: bool = True  # rows that begin alike share the computation of that beginning
    context: ContextGroup | None = None  # the ranks that compute each pass together; all have the same passes

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks, or of groups of ranks, that make passes of their own."""
        return self.ranks.world_size // (1 if self.context is None else self.context.size)

    @property
    def sum_weight(self) -> float:
        """Return the share of a pass's sums that this rank adds to the sums of all ranks."""
        return 1.0 if self.context is None else 1.0 / self.context.size

    @property
    def is_counted(self) -> bool:
        """Return whether this rank lists the rows of a pass; another rank may have the same pass."""
        return self.context is None or self.context.place == 0

    @property
    def family(self) -> Family:
        return self.policy.family

    @property
    def sharing_family(self) -> Family | None:
        """Return what `pack` needs to let rows share the computation of their beginning; None if they must not."""
        return self.family if self.joins_rows else None

    def token_counter(self) -> TokenCounter:
        """Return a counter of the tokens that the learner computes for items in one microbatch."""
        return TokenCounter(self.learner.form, self.sharing_family)

    @property
    def _limits(self) -> tuple[str, int, bool, Family | None]:
        """Return what bounds a microbatch, as the builders of units take it."""
        return self.learner.form, self.max_tokens, self.passes_are_private, self.sharing_family

    def units(self, groups: Sequence[AdvantageGroup], totals: Totals) -> list[MicrobatchUnit[PolicyBatch]]:
        """Pack groups into units of microbatches, in order, followed by empty units so that all ranks have the same
        number. `totals` is of the minibatch over all ranks. Raises DataError for a completion that does not fit into
        any microbatch."""
        units = self.ranks.run_on_all(lambda: policy_units(groups, totals, *self._limits))
        return units + [empty_unit(self._empty_item(), totals)] * self._missing(len(units))

    def example_units(self, groups: Sequence[ExampleGroup]) -> list[MicrobatchUnit[ExampleBatch]]:
        """Pack bundles into units, together with the bundles of the ranks that compute the same passes. Empty units
        follow, as in `units`."""
        groups = self.with_partners(groups, lambda group: group.items)
        units = self.ranks.run_on_all(lambda: example_units(groups, *self._limits))
        return units + [self.empty_examples()] * self._missing(len(units))

    def with_partners(self, items: Sequence[T], packed: Callable[[T], Sequence[PackItem]]) -> list[T]:
        """Return the items of all ranks that compute passes together (context parallelism), in their order. The ranks
        also send each other a frozen tower's features of the pictures, so that each picture is computed once."""
        if self.context is None:
            return list(items)
        images = tuple(image for item in items for each in packed(item) for image in each.images)
        if self.vision.is_frozen:
            self.vision.features(images)
        every = exchanged(self.ranks, self.context, (list(items), self.vision.held(images)))
        for _, features in every:
            self.vision.adopt(features)
        return [item for of_rank, _ in every for item in of_rank]

    def empty_examples(self) -> MicrobatchUnit[ExampleBatch]:
        """Make a unit without a scored token."""
        return MicrobatchUnit(batches=(ExampleBatch(packed=pack([self._empty_item()]), prompt_ids=(), examples=()),))

    def as_reference(self) -> AbstractContextManager[None]:
        """Make the policy compute as the reference does. Weights that are trained whole stay as they are."""
        return self.policy.as_reference()

    def scores(self, unit: MicrobatchUnit[Any], *, of_reference: bool = False) -> list[TokenScores]:
        """Compute logprobs and entropies (N,) of each microbatch of a unit, without gradient. Set `of_reference` inside
        `as_reference`."""
        with torch.no_grad():
            return [
                self.learner(packed, features_KH, self.temperature, prefix)
                for packed, features_KH, prefix in self.inputs(unit, of_reference=of_reference)
            ]

    def states(self, unit: MicrobatchUnit[Any]) -> list[Tensor]:
        """Compute the states (N, H) that predict the scored tokens of each microbatch of a unit, without gradient. Only
        possible if passes are private."""
        with torch.no_grad():
            return [self.learner.scoring_states(*inputs) for inputs in self.inputs(unit)]

    def inputs(
        self, unit: MicrobatchUnit[Any], *, with_gradient: bool = False, of_reference: bool = False
    ) -> Iterator[tuple[PackedTokens, Tensor | None, PrefixCache | None]]:
        """Yield the inputs of each microbatch's pass. Compute its gradient before asking for the next; after the last
        that continues a prefix, the gradients that were left there go back through it."""
        heartbeat = self.ranks.heartbeat
        features = partial(self.vision.features, with_gradient=with_gradient, of_reference=of_reference)
        for batch, features_KH, prefix in passes(
            unit, self.learner.run_prefix, features, lambda batch: heartbeat.work_on(batch.prompt_ids)
        ):
            yield batch.packed, features_KH, prefix

    def _empty_item(self) -> PackItem:
        family = self.family
        ordinary = next(i for i in range(family.vocabulary_size) if i not in family.placeholder_ids)
        return empty_item(family.position_dimensions, ordinary)

    def _missing(self, own: int) -> int:
        """Return how many empty passes follow `own`, so that every rank makes at least one pass; private passes need
        none."""
        return 0 if self.passes_are_private else max(1, self.ranks.all_reduce_max(own)) - own


def passes_for_inference(policy: Policy, recipe: BaseRecipe, ranks: Ranks = ALONE) -> PolicyPasses:
    """Wrap a policy that was loaded for inference and that each rank holds whole."""
    return PolicyPasses(
        policy=policy,
        learner=new_learner(policy, recipe, policy.device)[0].eval(),
        vision=VisionStore(policy, 0),
        ranks=ranks,
        passes_are_private=True,
        temperature=learning_temperature(recipe),
        max_tokens=tokens_without_gradient(recipe),
        joins_rows=joins_rows(recipe),
    )


def new_learner(
    policy: Policy,
    recipe: BaseRecipe,
    device: torch.device,
    strategy: StrategyKind = STRATEGY_KINDS["single"],
    context: ContextGroup | None = None,
) -> tuple[PackedPolicy, tuple[str, ...]]:
    """Make the learner of the recipe's form, or of the form that the policy and the device allow, and give the reasons
    of what was chosen, for the log. `context` has the ranks that compute its packs together."""
    language_model = policy.family.language_model(policy.model)
    obstacle = policy.family.sharing_obstacle(language_model.config)
    rule = rule_in_use(language_model, device)
    reasons = [f"delta nets: computed by {rule}"] if rule else []
    reasons += own_dropout(language_model.config)
    form = chosen_form(recipe.learner.form, device, obstacle, in_parts=context is not None)
    require_whole_rows(recipe, form)
    if obstacle:
        reasons.append(
            f"learner.form: repeated, each completion with a prompt of its own: this model cannot share, {obstacle}"
        )
    if form == "flex" and device.type == "cuda":
        form, reason = _form_that_fits(policy, recipe, device)
        reasons.append(reason)
    backend, reason = chosen_backend(recipe, strategy, form, device)
    learner = PackedPolicy(policy, form, recipe.learner.gradient_checkpointing, backend, context)
    return learner, tuple(filter(None, [*reasons, reason]))


def require_whole_rows(recipe: BaseRecipe, form: str) -> None:
    """Raise RecipeError if a microbatch does not hold the longest rows in the form that `learner.form: auto` became."""
    tokens, budget = recipe.data.max_prompt_tokens, recipe.learner.max_tokens_per_microbatch
    needed = recipe.with_values({"learner.form": form}).smallest_microbatch(tokens)
    if budget != "auto" and recipe.smallest_microbatch(tokens) <= budget < needed:
        raise RecipeError(
            [
                f"learner.max_tokens_per_microbatch: is {budget}, but must hold {needed}, because this model repeats "
                f"the prompt of each answer: data.max_prompt_tokens is {tokens}"
            ]
        )


def joins_rows(recipe: BaseRecipe) -> bool:
    """Return whether rows that begin alike may share the computation of that beginning. They may not if each row has
    random numbers of its own in it: dropout, or noise on its embeddings."""
    has_dropout = recipe.lora is not None and recipe.lora.dropout > 0
    has_noise = isinstance(recipe, SftRecipe) and recipe.sft.neftune_alpha is not None
    return not has_dropout and not has_noise


def learning_temperature(recipe: BaseRecipe) -> float:
    """Return the temperature that logits are divided by: the sampling temperature in GRPO, 1 in SFT."""
    return recipe.rollout.temperature if isinstance(recipe, GrpoRecipe) else 1.0


def _form_that_fits(policy: Policy, recipe: BaseRecipe, device: torch.device) -> tuple[str, str]:
    """Return flex; or dense with the reason, if flex was not asked for and the GPU cannot run its kernels. Raises
    ModelError if it was asked for."""
    config = policy.family.language_model(policy.model).config
    learns = any(parameter.requires_grad for parameter in policy.model.parameters())
    obstacle = flex_obstacle(config, policy.compute_dtype, device, learns=learns)
    if obstacle is None:
        return "flex", ""
    if recipe.learner.form == "flex":
        raise ModelError(f"learner.form: flex {obstacle}; set learner.form: dense")
    return "dense", f"learner.form: dense, whose memory grows with the square of a row's length: flex {obstacle}"

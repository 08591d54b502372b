"""The policy pass: embeddings, decoder and head in one module that a strategy can wrap.

All weights are used inside `PackedPolicy.forward`. The exception is `PackedPolicy.run_prefix`, which only strategies
that keep the module whole may call. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tiercel.config.schema import Checkpointing
from tiercel.devices import moved
from tiercel.distributed.context import ContextGroup
from tiercel.models.layers.attention import (
    Attend,
    AttentionForm,
    PackAttend,
    attention_spans_of,
    form_inputs,
    position_ids,
)
from tiercel.models.layers.attention_span import Span, sequence_masks
from tiercel.models.layers.experts import ExpertLoad
from tiercel.models.layers.value_head import value_head
from tiercel.models.policy import Policy
from tiercel.packing.activation_checkpointing import SavedAttention, checkpoint_layers
from tiercel.packing.attention.block_mask import BLOCK
from tiercel.packing.attention.flex import FlexAttention
from tiercel.packing.attention.prefix import ContinuedAttention, LayerCache, PrefixCache
from tiercel.packing.attention.split_and_dense import DenseAttention, SplitAttention
from tiercel.packing.compiling import compile_tower, compiled_layers, like_later_inputs
from tiercel.packing.context_parallel import GatheredAttention, Part, PartForm, joined, part_of
from tiercel.packing.layout import PackedTokens
from tiercel.packing.logprobs import TokenHead, TokenScores
from tiercel.packing.pass_options import NOTHING, EmbeddingNoise, PassOptions
from tiercel.packing.recurrence import PackedForm
from tiercel.packing.tree import PrefixTree

MakeAttention = Callable[[PrefixTree, torch.device, Sequence[Span]], PackAttend]  # the spans are those of the queries
ATTENTIONS: dict[str, MakeAttention] = {  # by learner.form
    "split": SplitAttention,
    "flex": FlexAttention,
    "dense": DenseAttention,
}

Choose = Callable[[Tensor], Tensor]  # takes some of the pack's tokens, along the last dimension
Embed = Callable[[Choose], Tensor]  # of the tokens that are chosen
CHUNK_MULTIPLES = {"flex": BLOCK}  # the length of a rank's chunks must be a multiple of this


class PackedPolicy(nn.Module):
    """The module that computes logprobs of the scored tokens of packed groups under the current policy. `form` comes
    from pass_options.chosen_form and `backend` from compiling.chosen_backend. `context` is the group of ranks that
    compute each pack together; all of them get the same packs."""

    def __init__(
        self,
        policy: Policy,
        form: str,
        checkpointing: Checkpointing,
        backend: str | None = None,
        context: ContextGroup | None = None,
    ):
        super().__init__()
        self.form = form
        self.context = context
        self.family = policy.family
        self.autocast = policy.autocast
        self.trains_vision = not policy.vision_is_frozen
        self.language_model = policy.family.language_model(policy.model)
        self.embedding = policy.family.embedding(policy.model)
        head = policy.model.get_output_embeddings()
        self.value_head = value_head(policy.model)
        self.head = TokenHead(head, policy.family.placeholder_ids, policy.family.logit_cap)
        # A head in half precision computes its sums in float32; autocast would round them.
        self.head_autocast = policy.autocast if head.weight.dtype == torch.float32 else nullcontext
        self.checkpointing = checkpointing
        checkpoint_layers(policy.model, self.language_model.config, checkpointing)
        self.compiled = compiled_layers(self.language_model, backend)
        if (tower := policy.family.tower_of_spans(policy.model)) is not None:
            compile_tower(tower, backend)
        self.expert_load = ExpertLoad(self.language_model)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(
        self,
        batch: PackedTokens,
        features_KH: Tensor | None,
        temperature: float,
        prefix: PrefixCache | None = None,
        options: PassOptions = NOTHING,
    ) -> TokenScores:
        """Compute logprobs and entropy of the N scored tokens, or their values if the policy is a reward model.
        `features_KH`: vision features of `batch.images`, in their order; None without images. `prefix`: the pass over
        the batch's first node, if it was run before; `batch.images` are then those after that node. `options`: what a
        loss needs besides."""
        if self.context is not None:
            assert prefix is None  # no single rank has all of it
            part = part_of(batch, self.context, CHUNK_MULTIPLES.get(self.form, 1))
            hidden_MH = self._part_states(batch, features_KH, part, self.context, options.noise)
            return joined(self._scores(hidden_MH, batch, part.scored_M, temperature, options), part, self.context)
        hidden_NH = self.scoring_states(batch, features_KH, prefix, options.noise)
        is_by_row = options.target is not None and options.target.is_by_row
        distinct = None if self.form == "repeated" or is_by_row else batch.distinct()
        if distinct is None:
            return self._scores(hidden_NH, batch, slice(None), temperature, options)
        first_M, which_N = distinct
        scores = self._scores(hidden_NH[moved(first_M, self.device)], batch, first_M, temperature, options)
        return scores.of(moved(which_N, self.device))

    def _scores(
        self,
        hidden_MH: Tensor,
        batch: PackedTokens,
        chosen_M: Tensor | slice,
        temperature: float,
        options: PassOptions,
    ) -> TokenScores:
        """Compute the scores of some of the scored tokens from the states that predict them."""
        if self.value_head is not None:
            none = hidden_MH.new_empty(0, dtype=torch.float32)
            return TokenScores(logprobs_N=none, entropy_N=none, values_N=self.value_head(hidden_MH))
        targets_M = moved(batch.targets_N[chosen_M], self.device)
        with self.head_autocast():
            return self.head(hidden_MH, targets_M, temperature, options=options.of_tokens(chosen_M))

    def scoring_states(
        self,
        batch: PackedTokens,
        features_KH: Tensor | None,
        prefix: PrefixCache | None,
        noise: EmbeddingNoise | None = None,
    ) -> Tensor:
        """Compute the hidden states (N, H) that predict the scored tokens."""
        with self.autocast():
            embed = partial(self._embedded, batch, features_KH, noise)
            if self.form == "repeated":
                return self._repeated_states(batch, embed)
            states_TH = self._states_after(prefix, batch, embed)
            if prefix is not None:
                states_TH = torch.cat([prefix.states().to(states_TH.dtype), states_TH])
            return states_TH[moved(batch.scoring_N, self.device)]

    def _part_states(
        self,
        batch: PackedTokens,
        features_KH: Tensor | None,
        part: Part,
        context: ContextGroup,
        noise: EmbeddingNoise | None,
    ) -> Tensor:
        """Compute the hidden states (M, H) of this rank's tokens that predict the scored tokens."""
        if features_KH is not None:
            is_vision_T = self.family.is_placeholder(batch.token_ids_T)
            feature_S = part.of(is_vision_T.cumsum(0) * is_vision_T)  # counted from 1; 0: not a token of a picture
            features_KH = features_KH[moved(feature_S[feature_S > 0] - 1, self.device)]
        attend = GatheredAttention(self._attention(part.tree, part.spans), context)
        form = PartForm(self._kept(attend), batch, part, context, self.device)
        with self.autocast():
            embeddings_SH = self._embedded(batch, features_KH, noise, part.of)
            hidden_SH = self._states(embeddings_SH, part.of(batch.positions_DT), form)
            return hidden_SH[moved(part.states_M, self.device)]

    def run_prefix(
        self, prefix: PackedTokens, features_KH: Tensor | None, before: PrefixCache | None = None
    ) -> PrefixCache:
        """Run the tokens that several microbatches begin with. `prefix` has no rows; with `before`, its first node is
        what that pass has computed."""
        kept: dict[int, LayerCache] = {}
        with self.autocast():
            embed = partial(self._embedded, prefix, features_KH, None)
            states_PH = self._states_after(before, prefix, embed, kept)
        return PrefixCache(kept, states_PH, before)

    def _states_after(
        self, prefix: PrefixCache | None, batch: PackedTokens, embed: Embed, kept: dict[int, LayerCache] | None = None
    ) -> Tensor:
        """Compute the last hidden states (S, H) of a pack, or of what follows its first node if `prefix` is the pass
        over that. `kept` as in ContinuedAttention."""
        first = 0 if prefix is None else batch.tree.nodes[0].size
        form = self._form(batch, first)
        attention = form if prefix is None and kept is None else ContinuedAttention(form, prefix, kept)
        return self._states(embed(lambda tensor_T: tensor_T[..., first:]), batch.positions_DT[:, first:], attention)

    def _embedded(
        self, batch: PackedTokens, features_KH: Tensor | None, noise: EmbeddingNoise | None, of: Choose
    ) -> Tensor:
        """Embed the tokens (S, H) that `of` chooses, with noise. The features are those of the placeholders among
        them."""
        embeddings_SH = self.embedding(moved(of(batch.token_ids_T), self.device))
        if noise is not None:
            noise_TH = noise.of(batch.tree, embeddings_SH.detach(), self.head.linear.in_features)
            embeddings_SH = embeddings_SH + of(noise_TH.T).T
        if self.trains_vision and torch.is_grad_enabled() and not embeddings_SH.requires_grad:
            embeddings_SH.requires_grad_()  # so that a pass without images has a backward pass too
        if features_KH is None:
            return embeddings_SH
        is_vision_S = moved(of(self.family.is_placeholder(batch.token_ids_T)), self.device)
        return self.family.with_features(embeddings_SH, is_vision_S, features_KH)

    def _form(self, batch: PackedTokens, first_query: int = 0) -> PackedForm:
        """Build the form for a pass over the pack, or over what follows its first `first_query` tokens."""
        attend = self._attention(batch.tree, batch.tree.after(first_query))
        return PackedForm(self._kept(attend), batch.tree, self.device, first_query)

    def _attention(self, tree: PrefixTree, queries: Sequence[Span]) -> PackAttend:
        """Build the attention of the tokens in `queries`."""
        return ATTENTIONS[self.form](tree, self.device, queries)

    def _kept(self, attend: Attend) -> Attend:
        return SavedAttention(attend) if self.checkpointing == "selective" else attend

    def _states(self, embeddings_TH: Tensor, positions_DT: Tensor, attention: AttentionForm) -> Tensor:
        return self._decoded(embeddings_TH[None], positions_DT[:, None], **form_inputs(attention))[0]

    def _decoded(self, embeddings_RTH: Tensor, positions_DRT: Tensor, **options: Any) -> Tensor:
        """Compute the last hidden states (R, T, H)."""
        inputs = self.family.decoder_inputs(embeddings_RTH)
        positions = position_ids(moved(positions_DRT, self.device))
        if self.compiled is not None:
            inputs["inputs_embeds"] = like_later_inputs(inputs["inputs_embeds"])
        with self.expert_load.counting(), nullcontext() if self.compiled is None else self.compiled.running():
            return self.language_model(**inputs, position_ids=positions, **options).last_hidden_state

    def _repeated_states(self, batch: PackedTokens, embed: Embed) -> Tensor:
        """Compute the hidden states (N, H) that predict the scored tokens, with one causal row for each completion that
        repeats its prompt."""
        places_RU, row_N, column_N = self._repeated_layout(batch)
        embeddings_RUH = embed(lambda tensor_T: tensor_T)[moved(places_RU, self.device)]
        masks = self._repeated_masks(batch, places_RU.shape[1])
        hidden_RUH = self._decoded(
            embeddings_RUH, batch.positions_DT[:, places_RU], attention_mask=masks, use_cache=False
        )
        return hidden_RUH[moved(row_N, self.device), moved(column_N, self.device)]

    def _repeated_masks(self, batch: PackedTokens, length: int) -> dict[str, Tensor] | None:
        """Return the masks (R, 1, U, U) of repeated rows by kind of layer, if there are pictures whose tokens see each
        other. Without such pictures, transformers makes the masks itself."""
        if not batch.tree.picture_spans:
            return None
        spans = [batch.tree.picture_spans_in(*batch.tree.path(end)) for end in batch.ends_C]
        by_kind = attention_spans_of(self.language_model.config)
        return {kind: moved(sequence_masks(each, length, spans), self.device) for kind, each in by_kind.items()}

    def _repeated_layout(self, batch: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places (R, U) in the pack of the tokens of each repeated row, and for each scored token the row
        (N,) and the column (N,) of the state that predicts it."""
        rows = [batch.tree.places(end) for end in batch.ends_C]
        places_RU = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=rows[0][0].item())
        return places_RU, batch.continuation_of_N, batch.tree.depth_T[batch.scoring_N]

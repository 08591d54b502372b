"""The policy pass: embeddings, decoder and head in one module that a strategy can wrap.

All weights are used inside `PackedPolicy.forward`. The exception is `PackedPolicy.run_prefix`, which only strategies
that keep the module whole may call. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tiercel.config.schema import Checkpointing
from tiercel.devices import moved
from tiercel.distributed.context import ContextGroup
from tiercel.models.layers.attention import AttentionForm, PackAttend, attention_spans_of, form_inputs, position_ids
from tiercel.models.layers.attention_span import Span, sequence_masks
from tiercel.models.layers.experts import ExpertLoad
from tiercel.models.layers.value_head import value_head
from tiercel.models.policy import Policy
from tiercel.packing.activation_checkpointing import SavedAttention, checkpoint_layers
from tiercel.packing.attention.block_mask import BLOCK
from tiercel.packing.attention.flex import FlexAttention
from tiercel.packing.attention.prefix import ContinuedAttention, PrefixCache, RecordingAttention
from tiercel.packing.attention.split_and_dense import DenseAttention, SplitAttention
from tiercel.packing.compiling import compiled_layers, like_later_inputs
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
        if self.context is None:
            hidden_NH = self.scoring_states(batch, features_KH, prefix, options.noise)
            is_by_row = options.target is not None and options.target.is_by_row
            distinct = None if self.form == "repeated" or is_by_row else batch.distinct()
            if distinct is None:
                return self._scores(hidden_NH, batch.targets_N, temperature, options)
            first_M, which_N = distinct
            hidden_MH = hidden_NH[moved(first_M, self.device)]
            scores = self._scores(hidden_MH, batch.targets_N[first_M], temperature, options.of_tokens(first_M))
            return scores.of(moved(which_N, self.device))
        assert prefix is None  # no single rank has all of it
        part = part_of(batch, self.context, CHUNK_MULTIPLES.get(self.form, 1))
        hidden_MH = self._part_states(batch, features_KH, part, self.context, options.noise)
        scores = self._scores(hidden_MH, batch.targets_N[part.scored_M], temperature, options.of_tokens(part.scored_M))
        return joined(scores, part, self.context)

    def _scores(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature: float,
        options: PassOptions,
    ) -> TokenScores:
        if self.value_head is not None:
            none = hidden_NH.new_empty(0, dtype=torch.float32)
            return TokenScores(logprobs_N=none, entropy_N=none, values_N=self.value_head(hidden_NH))
        with self.head_autocast():
            return self.head(hidden_NH, moved(targets_N, self.device), temperature, options=options)

    def scoring_states(
        self,
        batch: PackedTokens,
        features_KH: Tensor | None,
        prefix: PrefixCache | None,
        noise: EmbeddingNoise | None = None,
    ) -> Tensor:
        """Compute the hidden states (N, H) that predict the scored tokens."""
        with self.autocast():
            if prefix is not None:
                return self._states_after(batch, features_KH, prefix)
            noise_TH = self._noise(noise, batch)
            embeddings_TH = self._embedded(batch.token_ids_T, features_KH, noise_TH=noise_TH)
            if self.form == "repeated":
                return self._repeated_states(batch, embeddings_TH)
            hidden_TH = self._states(embeddings_TH, batch.positions_DT, self._form(batch))
            return hidden_TH[moved(batch.scoring_N, self.device)]

    def _part_states(
        self,
        batch: PackedTokens,
        features_KH: Tensor | None,
        part: Part,
        context: ContextGroup,
        noise: EmbeddingNoise | None,
    ) -> Tensor:
        """Compute the hidden states (M, H) of this rank's tokens that predict the scored tokens."""
        is_vision_T = self.family.is_placeholder(batch.token_ids_T)
        feature_S = part.of(is_vision_T.cumsum(0) * is_vision_T) - 1  # -1: not a token of a picture
        if features_KH is not None:
            features_KH = features_KH[moved(feature_S[feature_S >= 0], self.device)]
        attend: PackAttend = ATTENTIONS[self.form](part.tree, self.device, part.spans)
        form = PartForm(self._kept(GatheredAttention(attend, context)), batch, part, context, self.device)
        with self.autocast():
            noise_TH = self._noise(noise, batch)
            noise_SH = None if noise_TH is None else part.of(noise_TH.T).T
            embeddings_SH = self._embedded(part.of(batch.token_ids_T), features_KH, feature_S >= 0, noise_SH)
            hidden_SH = self._states(embeddings_SH, part.of(batch.positions_DT), form)
            return hidden_SH[moved(part.states_M, self.device)]

    def run_prefix(
        self, prefix: PackedTokens, features_KH: Tensor | None, before: PrefixCache | None = None
    ) -> PrefixCache:
        """Run the tokens that several microbatches begin with. `prefix` has no rows; with `before`, its first node is
        what that pass has computed."""
        first = 0 if before is None else _run_before(prefix)
        recording = RecordingAttention(self._form(prefix, first), before)
        with self.autocast():
            states_PH = self._states_from(first, prefix, features_KH, recording)
        return PrefixCache(recording.kept, states_PH, before)

    def _noise(self, noise: EmbeddingNoise | None, batch: PackedTokens) -> Tensor | None:
        """Draw the noise (T, H) for a pack's embeddings."""
        if noise is None:
            return None
        like_TH = self.embedding(moved(batch.token_ids_T[:1], self.device)).detach()
        return noise.of(batch.tree, like_TH, self.head.linear.in_features)

    def _embedded(
        self,
        token_ids_T: Tensor,
        features_KH: Tensor | None,
        is_vision_T: Tensor | None = None,
        noise_TH: Tensor | None = None,
    ) -> Tensor:
        """Embed the tokens. Features replace those of `is_vision_T`, or all placeholders if it is None; `noise_TH` is
        added to the others."""
        token_ids_T = moved(token_ids_T, self.device)
        embeddings_TH = self.embedding(token_ids_T)
        if noise_TH is not None:
            embeddings_TH = embeddings_TH + noise_TH
        if self.trains_vision and torch.is_grad_enabled() and not embeddings_TH.requires_grad:
            embeddings_TH.requires_grad_()  # so that a pass without images has a backward pass too
        if features_KH is None:
            return embeddings_TH
        if is_vision_T is None:
            is_vision_T = self.family.is_placeholder(token_ids_T)
        return self.family.with_features(embeddings_TH, moved(is_vision_T, self.device), features_KH)

    def _form(self, batch: PackedTokens, first_query: int = 0) -> PackedForm:
        """Build the form for a pass over the pack, or over what follows its first `first_query` tokens."""
        attend: PackAttend = ATTENTIONS[self.form](batch.tree, self.device, batch.tree.after(first_query))
        return PackedForm(self._kept(attend), batch.tree, self.device, first_query)

    def _kept(self, attend: PackAttend) -> PackAttend:
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

    def _states_after(self, batch: PackedTokens, features_KH: Tensor | None, prefix: PrefixCache) -> Tensor:
        """Compute the hidden states (N, H) that predict the scored tokens, in a pass over what follows the prefix."""
        first = _run_before(batch)
        attention = ContinuedAttention(self._form(batch, first), prefix)
        own_SH = self._states_from(first, batch, features_KH, attention)
        states_TH = torch.cat([prefix.states().to(own_SH.dtype), own_SH])
        return states_TH[moved(batch.scoring_N, self.device)]

    def _states_from(
        self, first: int, batch: PackedTokens, features_KH: Tensor | None, attention: AttentionForm
    ) -> Tensor:
        """Compute the last hidden states (S, H) of the tokens from `first` on."""
        embeddings_SH = self._embedded(batch.token_ids_T[first:], features_KH)
        return self._states(embeddings_SH, batch.positions_DT[:, first:], attention)

    def _repeated_states(self, batch: PackedTokens, embeddings_TH: Tensor) -> Tensor:
        """Compute the hidden states (N, H) that predict the scored tokens, with one causal row for each completion that
        repeats its prompt."""
        places_RU, row_N, column_N = self._repeated_layout(batch)
        embeddings_RUH = embeddings_TH[moved(places_RU, self.device)]
        masks = self._repeated_masks(batch, places_RU.shape[1])
        hidden_RUH = self._decoded(
            embeddings_RUH, batch.positions_DT[:, places_RU], attention_mask=masks, use_cache=False
        )
        return hidden_RUH[moved(row_N, self.device), moved(column_N, self.device)]

    def _repeated_masks(self, batch: PackedTokens, length: int) -> dict[str, Tensor] | None:
        """Return the masks (R, 1, U, U) of repeated rows by kind of layer, if there are pictures whose tokens see each
        other. Without such pictures, transformers makes the masks itself."""
        tree = batch.tree
        if not tree.picture_spans:
            return None
        spans: list[list[Span]] = []
        for end in batch.ends_C:
            spans.append([])
            for number in tree.path(end):
                depth = tree.depths[number]
                of_node = tree.picture_spans_in(tree.nodes[number].span)
                spans[-1] += [(start + depth, stop + depth) for start, stop in of_node]
        by_kind = attention_spans_of(self.language_model.config)
        return {
            kind: moved(sequence_masks(attention_span, length, spans), self.device)
            for kind, attention_span in by_kind.items()
        }

    def _repeated_layout(self, batch: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places (R, U) in the pack of the tokens of each repeated row, and for each scored token the row
        (N,) and the column (N,) of the state that predicts it."""
        rows = [batch.tree.places(end) for end in batch.ends_C]
        column_N = torch.zeros_like(batch.scoring_N)
        for number, row in enumerate(rows):
            mine = batch.continuation_of_N == number
            column_N[mine] = torch.searchsorted(row, batch.scoring_N[mine])
        places_RU = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=rows[0][0].item())
        return places_RU, batch.continuation_of_N, column_N


def _run_before(batch: PackedTokens) -> int:
    """Return how many tokens of a pack another pass has computed, if one has."""
    return batch.tree.nodes[0].span[1]

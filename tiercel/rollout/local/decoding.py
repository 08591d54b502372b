"""Prefill and one-token steps of the local engine: the keys and values of each layer, and the attention of a new token.

`SharedDecoder` keeps a prompt's keys and values once for its whole group. `RepeatedDecoder` uses the cache of
transformers with the prompt repeated, for models that cannot share prompts and for comparison in tests. Shape suffixes:
docs/shapes.md. B are the prompts of a batch, R the rows that are being decoded.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tiercel.devices import moved
from tiercel.models.layers.attention import AttentionForm, attention_spans_of, form_inputs, position_ids
from tiercel.models.layers.attention_span import FULL, AttentionSpan
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.tree import groups_tree
from tiercel.rollout.local.attention import DecodeAttention
from tiercel.rollout.local.paused_rows import ResumedAttention, ResumedTokens, RowMemory, RowState
from tiercel.rollout.local.prefill import (
    PaddedPrompts,
    PrefillAttention,
    PromptTree,
    TreePrefill,
    prompt_tree,
    starts_after,
)
from tiercel.types import EncodedImage, EncodedPrompt

MOST_SCORES = 2**22  # of a head, in a pass of observed tokens


class Decoder(Protocol):
    """A decoder of one batch of prompts, each with `group_size` rows. Rows are removed when they have ended."""

    keeps_casts: bool  # autocast may keep cast weights from token to token
    backend: Any  # the compiler of steps and draws; None: they are not compiled

    def prefill(
        self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int, *, rows_return: bool = False
    ) -> Tensor:
        """Run the prompts. Returns the logits (B, V) after each. With `rows_return`, rows that were taken come back,
        and `max_new_tokens` is the limit of a turn."""

    def step(self, token_ids_R: Tensor) -> Tensor:
        """Add one token to every row. Returns the logits (R, V) after it."""

    def rows_for(self, going_on: int) -> int:
        """Return how many rows to decode if this many go on; the others have ended."""

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows, given by their places among the current ones, in order."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are held for the rows of the last batch."""

    def release(self) -> None:
        """Free them."""


class BaseDecoder:
    """The common parts of the decoders: padded prompts, positions, logits."""

    keeps_casts = True
    backend: Any = None

    def __init__(self, policy: Policy, vision: VisionStore):
        self.policy = policy
        self.vision = vision
        self.family = policy.family
        self.language_model = policy.family.language_model(policy.model)
        self.embedding = policy.family.embedding(policy.model)
        self.head = policy.model.get_output_embeddings()

    def padded(self, prompts: Sequence[EncodedPrompt]) -> PaddedPrompts:
        """Pad the prompts to the longest, with their vision features in place."""
        device = self.policy.device
        lengths = tuple(len(prompt.token_ids_P) for prompt in prompts)
        ids_BP = moved(nn.utils.rnn.pad_sequence([p.token_ids_P for p in prompts], batch_first=True), device)
        positions = [p.positions_DP.T for p in prompts]
        positions_DBP = moved(nn.utils.rnn.pad_sequence(positions, batch_first=True).permute(2, 0, 1), device)
        lengths_B = moved(torch.tensor(lengths), device)
        is_prompt_BP = torch.arange(ids_BP.shape[1], device=device) < lengths_B[:, None]
        is_vision_BP = self.family.is_placeholder(ids_BP) & is_prompt_BP
        return PaddedPrompts(
            embeddings_BPH=self.embedded(ids_BP, [image for p in prompts for image in p.images], is_vision_BP),
            positions=position_ids(positions_DBP),
            lengths=lengths,
            lengths_B=lengths_B,
            starts_B=moved(torch.tensor(starts_after(prompts)), device),
            picture_spans=tuple(prompt.picture_spans for prompt in prompts),
        )

    def embedded(self, token_ids: Tensor, images: Sequence[EncodedImage], is_vision: Tensor) -> Tensor:
        """Embed tokens (..., H), with the features of the pictures in place of those of `is_vision`."""
        embeddings = self.embedding(token_ids)
        features_KH = self.vision.features(images)
        return embeddings if features_KH is None else self.family.with_features(embeddings, is_vision, features_KH)

    def rows_for(self, going_on: int) -> int:
        return going_on

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Compute the logits (R, V)."""
        logits_RV = self.head(hidden_RH)
        cap = self.family.logit_cap
        return logits_RV if cap is None else cap * torch.tanh(logits_RV.float() / cap)

    def logits_after(self, prompts: PaddedPrompts, hidden_BPH: Tensor) -> Tensor:
        """Compute the logits (B, V) at the last token of each prompt."""
        order_B = torch.arange(len(hidden_BPH), device=hidden_BPH.device)
        return self.logits(hidden_BPH[order_B, prompts.lengths_B - 1])

    def new_positions(self, positions_R: Tensor) -> Tensor:
        """Return the positions of one new token in every row, equal in all dimensions."""
        return position_ids(positions_R[None, :, None].expand(self.family.position_dimensions, -1, 1))

    def hidden_states(self, prompts: PaddedPrompts, form: AttentionForm) -> Tensor:
        """Run the prompts. Returns the last hidden states (B, P, H)."""
        return self.language_model(
            **self.prompt_inputs(prompts.embeddings_BPH), position_ids=prompts.positions, **form_inputs(form)
        ).last_hidden_state

    def prompt_inputs(self, embeddings_BPH: Tensor) -> dict[str, Any]:
        """Return the arguments of the language model for embedded prompts."""
        return self.family.decoder_inputs(embeddings_BPH)

    def new_hidden_states(self, token_ids_R: Tensor, positions_R: Tensor, form: AttentionForm) -> Tensor:
        """Run one token of every row. Returns its last hidden state (R, H)."""
        hidden_R1H = self.language_model(
            **self.family.decoder_inputs(self.embedding(token_ids_R[:, None])),
            position_ids=self.new_positions(positions_R),
            **form_inputs(form),
        ).last_hidden_state
        return hidden_R1H[:, 0]


class RowDecoder(BaseDecoder):
    """A decoder of a batch whose rows can leave it, and come back with what they observed."""

    @property
    def rows(self) -> RowMemory:
        """Return the memory of the rows of the batch."""
        raise NotImplementedError

    def put(self, rows: Sequence[RowState], order: Sequence[int]) -> None:
        """Put rows after those of the batch, and then all rows in order, sorted by prompt."""
        raise NotImplementedError

    def run(self, rows: Sequence[ResumedTokens]) -> tuple[list[RowState], Tensor]:
        """Run the new tokens of rows that are not in the batch, in passes of at most MOST_SCORES scores of a head.
        Returns the rows with them, and the logits (N, V) after each."""
        seen = max(self.rows.prompt_lengths) + max(row.state.length for row in rows)
        new = max(len(row.tokens.token_ids_P) for row in rows)
        count = max(1, MOST_SCORES // (new * (seen + new)))
        states, logits = [], []
        for first in range(0, len(rows), count):
            padded = self.padded([row.tokens for row in rows[first : first + count]])
            form = ResumedAttention(self.rows, rows[first : first + count], self.policy.device)
            logits.append(self.logits_after(padded, self.hidden_states(padded, form)))
            states += form.states()
        return states, torch.cat(logits)


class SharedDecoder(RowDecoder):
    """Decoder that runs what prompts begin with once for all of them, and each prompt once for its group, on a CPU. The
    memory of all new tokens is allocated before the first one."""

    def __init__(self, policy: Policy, vision: VisionStore):
        super().__init__(policy, vision)
        self.release()

    def prefill(
        self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int, *, rows_return: bool = False
    ) -> Tensor:
        self.positions_R = torch.tensor(starts_after(prompts)).repeat_interleave(group_size)
        tree = prompt_tree(prompts, self.family)
        if tree is None:
            laid = groups_tree(*([len(prompt.token_ids_P)] for prompt in prompts))
            ends: Sequence[int] = range(len(prompts))
        else:
            laid, ends = tree.decoded.tree, tree.decoded.ends
        self.attention = DecodeAttention(laid, ends, group_size, max_new_tokens, rows_return)
        logits_BV = self._side_by_side(prompts) if tree is None else self._as_tree(tree)
        self.attention.arrange()
        return logits_BV

    def _side_by_side(self, prompts: Sequence[EncodedPrompt]) -> Tensor:
        padded = self.padded(prompts)
        return self.logits_after(padded, self.hidden_states(padded, PrefillAttention(self.attention, padded)))

    def _as_tree(self, tree: PromptTree) -> Tensor:
        laid = tree.laid
        embeddings_TH = self.embedded(laid.token_ids_T, laid.images, self.family.is_placeholder(laid.token_ids_T))
        hidden_1TH = self.language_model(
            **self.family.decoder_inputs(embeddings_TH[None]),
            position_ids=position_ids(laid.positions_DT[:, None]),
            **form_inputs(TreePrefill(self.attention, tree)),
        ).last_hidden_state
        return self.logits(hidden_1TH[0, tree.lasts_B])

    def step(self, token_ids_R: Tensor) -> Tensor:
        logits_RV = self.logits(self.new_hidden_states(token_ids_R, self.positions_R, self.attention))
        self.attention.add_token()
        self.positions_R += 1
        return logits_RV

    def keep(self, kept: Sequence[int]) -> None:
        self.positions_R = self.positions_R[torch.tensor(kept, dtype=torch.int64)]
        self.attention.keep(kept)

    @property
    def rows(self) -> RowMemory:
        return self.attention

    def put(self, rows: Sequence[RowState], order: Sequence[int]) -> None:
        self.positions_R = torch.cat([self.positions_R, torch.tensor([row.position for row in rows])])
        self.attention.append(rows)
        self.keep(order)

    @property
    def held_bytes(self) -> int:
        levels = self.attention.all_levels or self.attention.levels
        in_pairs = [*self.attention.own_tokens.values(), *(pair for level in levels for pair in level.held.values())]
        return sum(tensor.nbytes for tensors in in_pairs for tensor in tensors)

    def release(self) -> None:
        self.attention = DecodeAttention(groups_tree(), (), 0, 0)


class RepeatedDecoder(BaseDecoder):
    """Decoder with the cache of transformers. Each prompt's keys and values are repeated for every row, and rows that
    have left do not come back."""

    def __init__(self, policy: Policy, vision: VisionStore):
        super().__init__(policy, vision)
        self.release()

    def prefill(
        self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int, *, rows_return: bool = False
    ) -> Tensor:
        padded = self.padded(prompts)
        self.cache = DynamicCache()
        hidden_BPH = self.language_model(
            **self.family.decoder_inputs(padded.embeddings_BPH),
            position_ids=padded.positions,
            attention_mask=self._masks(padded.mask),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.cache.batch_repeat_interleave(group_size)
        self.lengths_R = padded.lengths_B.repeat_interleave(group_size)
        self.positions_R = padded.starts_B.repeat_interleave(group_size)
        order_P = torch.arange(hidden_BPH.shape[1], device=self.lengths_R.device)
        self.order_RP = order_P.where(order_P < self.lengths_R[:, None], -1)  # -1: padding
        return self.logits_after(padded, hidden_BPH)

    def _masks(self, mask: Callable[[AttentionSpan], Tensor | None]) -> Tensor | dict[str, Tensor | None] | None:
        """Return the mask of all layers, or those of each kind of layer."""
        sights = attention_spans_of(self.language_model.config)
        if "sliding_attention" in sights:
            return {kind: mask(attention_span) for kind, attention_span in sights.items()}
        return mask(sights.get("full_attention", FULL))

    def _step_mask(self, attention_span: AttentionSpan) -> Tensor:
        """Return the mask (R, 1, 1, P) of the newest token."""
        sees_RP = self.order_RP >= 0
        if attention_span.window is not None:
            sees_RP &= self.order_RP > self.lengths_R[:, None] - attention_span.window
        return sees_RP[:, None, None]

    def step(self, token_ids_R: Tensor) -> Tensor:
        self.order_RP = torch.cat([self.order_RP, self.lengths_R[:, None]], dim=1)
        hidden_R1H = self.language_model(
            **self.family.decoder_inputs(self.embedding(token_ids_R[:, None])),
            position_ids=self.new_positions(self.positions_R),
            attention_mask=self._masks(self._step_mask),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.lengths_R, self.positions_R = self.lengths_R + 1, self.positions_R + 1
        return self.logits(hidden_R1H[:, 0])

    def keep(self, kept: Sequence[int]) -> None:
        kept_R = moved(torch.tensor(kept, dtype=torch.int64), self.positions_R.device)
        self.cache.batch_select_indices(kept_R)
        self.positions_R, self.lengths_R = self.positions_R[kept_R], self.lengths_R[kept_R]
        self.order_RP = self.order_RP[kept_R]

    @property
    def held_bytes(self) -> int:
        layers: list[Any] = list(self.cache.layers)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def release(self) -> None:
        self.cache = DynamicCache()

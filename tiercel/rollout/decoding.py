"""Prefill and one-token steps of the local engine: the keys and values of each layer, and the attention of a new token.

`SharedDecoder` keeps a prompt's keys and values once for its whole group. `RepeatedDecoder` uses the cache of
transformers with the prompt repeated, for models that cannot share prompts and for comparison in tests. Shape suffixes:
docs/shapes.md. B are the prompts of a batch, R the rows that are being decoded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from tiercel.models.attention import AttentionForm, Layer, form_inputs, sights_of
from tiercel.models.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.models.images import moved
from tiercel.models.policy import Policy
from tiercel.models.sight import FULL, Sight, Span, sequence_masks
from tiercel.models.vision import VisionStore
from tiercel.types import EncodedPrompt

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Decoder(Protocol):
    """Decodes one batch of prompts, each with `group_size` rows. Rows are removed when they have ended."""

    keeps_casts: bool  # autocast may keep cast weights from token to token

    def prefill(self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int) -> Tensor:
        """Run the prompts. Returns the logits (B, V) after each."""

    def step(self, token_ids_R: Tensor) -> Tensor:
        """Add one token to every row. Returns the logits (R, V) after it."""

    def rows_for(self, going_on: int) -> int:
        """Return how many rows to decode where so many go on; the others have ended."""

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows, given by their places among the present ones, in order."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are held for the rows of the last batch."""

    def release(self) -> None:
        """Free them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedPrompts:
    """Holds the prompts of a batch, padded on the right."""

    embeddings_BPH: Tensor
    positions: Tensor  # (D, B, P), or (B, P) where D is 1, as in transformers
    lengths: tuple[int, ...]
    lengths_B: Tensor  # the same on the device
    starts_B: Tensor  # first position after each prompt
    picture_spans: tuple[tuple[Span, ...], ...]  # of each prompt

    def mask(self, sight: Sight) -> Tensor | None:
        """Return the mask, bool (B, 1, P, P); None where it is causal. Padding comes last, so that no real token sees
        it."""
        length = self.embeddings_BPH.shape[1]
        sight = sight.within(length, [span for of_prompt in self.picture_spans for span in of_prompt])
        return (
            None if sight.is_causal else moved(sequence_masks(sight, length, self.picture_spans), self.starts_B.device)
        )


class BaseDecoder:
    """Has the common parts of the decoders: padded prompts, positions, logits."""

    keeps_casts = True

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
        embeddings_BPH = self.embedding(ids_BP)
        features_KH = self.vision.features([image for p in prompts for image in p.images])
        if features_KH is not None:
            is_prompt_BP = torch.arange(ids_BP.shape[1], device=device) < lengths_B[:, None]
            is_vision_BP = self.family.is_placeholder(ids_BP) & is_prompt_BP
            embeddings_BPH = self.family.with_features(embeddings_BPH, is_vision_BP, features_KH)
        starts = [int(p.positions_DP.max()) + 1 for p in prompts]
        return PaddedPrompts(
            embeddings_BPH=embeddings_BPH,
            positions=self._position_ids(positions_DBP),
            lengths=lengths,
            lengths_B=lengths_B,
            starts_B=moved(torch.tensor(starts), device),
            picture_spans=tuple(prompt.picture_spans for prompt in prompts),
        )

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
        return self._position_ids(positions_R[None, :, None].expand(self.family.position_dimensions, -1, 1))

    def hidden_states(self, prompts: PaddedPrompts, form: AttentionForm) -> Tensor:
        """Run the prompts. Returns the last hidden states (B, P, H)."""
        return self.language_model(
            **self.family.decoder_inputs(prompts.embeddings_BPH), position_ids=prompts.positions, **form_inputs(form)
        ).last_hidden_state

    def new_hidden_states(self, token_ids_R: Tensor, positions_R: Tensor, form: AttentionForm) -> Tensor:
        """Run one token of every row. Returns its last hidden state (R, H)."""
        hidden_R1H = self.language_model(
            **self.family.decoder_inputs(self.embedding(token_ids_R[:, None])),
            position_ids=self.new_positions(positions_R),
            **form_inputs(form),
        ).last_hidden_state
        return hidden_R1H[:, 0]

    def _position_ids(self, positions_DBP: Tensor) -> Tensor:
        return positions_DBP if len(positions_DBP) == 3 else positions_DBP[0]


class PromptStore(Protocol):
    """Keeps what the layers make of the prompts."""

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        """Keep the keys and values of a layer."""

    def put_state(self, layer: int, state: DeltaState) -> None:
        """Keep the state of a layer after each prompt."""


class PrefillAttention:
    """Computes the attention of padded prompts, and the recurrence of layers with a state."""

    def __init__(self, store: PromptStore, prompts: PaddedPrompts):
        self.store = store
        self.lengths_B = prompts.lengths_B
        self.mask = cache(prompts.mask)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        order_P = torch.arange(tokens.rate_RTA.shape[1], device=self.lengths_B.device)
        is_padding_BP = order_P >= self.lengths_B[:, None]
        output, state = scan(tokens.without(is_padding_BP), self.lengths_B)
        self.store.put_state(layer, state)
        return output

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        self.store.put(layer.index, key_BJTE, value_BJTE)
        mask = self.mask(layer.sight)
        return scaled_dot_product_attention(
            query_BATE, key_BJTE, value_BJTE, mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
        )


class DecodeAttention:
    """Computes the attention of one new token in every row: over its prompt, in one product for all rows of the prompt,
    and over the row's own new tokens. The two results are joined by their log-sum-exp. `lengths`: of the prompts."""

    def __init__(self, lengths: Sequence[int], group_size: int, max_new_tokens: int):
        self.lengths = list(lengths)
        self.prompt_of = [prompt for prompt in range(len(lengths)) for _ in range(group_size)]  # by row
        self.max_new_tokens = max_new_tokens
        self.length = 0  # new tokens of every row so far
        self.prompt_keys: dict[int, Tensor] = {}  # by layer
        self.prompt_values: dict[int, Tensor] = {}
        self.own_keys: dict[int, Tensor] = {}
        self.own_values: dict[int, Tensor] = {}
        self.states: dict[int, DeltaState] = {}
        self.biases: dict[int | None, Tensor | None] = {}  # by window, for the present token

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        self.prompt_keys[layer], self.prompt_values[layer] = key_BJPE, value_BJPE
        _, heads, _, size = key_BJPE.shape
        own_key = key_BJPE.new_empty(len(self.prompt_of), heads, self.max_new_tokens, size)
        self.own_keys[layer], self.own_values[layer] = own_key, torch.empty_like(own_key)

    def put_state(self, layer: int, state: DeltaState) -> None:
        self.states[layer] = state.of(torch.tensor(self.prompt_of))

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows, and the prompts that still have rows."""
        kept_R = torch.tensor(kept)
        for memory in (self.own_keys, self.own_values):
            for layer, own in memory.items():
                fresh = own.new_empty(len(kept), *own.shape[1:])
                fresh[:, :, : self.length] = own[kept_R, :, : self.length]
                memory[layer] = fresh
        self.states = {layer: state.of(kept_R) for layer, state in self.states.items()}
        self.prompt_of = [self.prompt_of[row] for row in kept]
        prompts = sorted(set(self.prompt_of))
        if len(prompts) < len(self.lengths):
            number_of = {prompt: number for number, prompt in enumerate(prompts)}
            self.prompt_of = [number_of[prompt] for prompt in self.prompt_of]
            self.lengths = [self.lengths[prompt] for prompt in prompts]
            longest = max(self.lengths)
            for shared in (self.prompt_keys, self.prompt_values):
                shared.update({layer: tensor[prompts, :, :longest] for layer, tensor in shared.items()})
        self.arrange()

    def arrange(self) -> None:
        """Compute the place of each row among the rows of its prompt, after the prefill and when rows have been
        removed."""
        self.most = max(Counter(self.prompt_of).values())  # rows of the prompt that has most of them
        slots = slots_of(self.prompt_of, self.most)
        is_full = len(slots) == self.most * len(self.lengths)
        self.slots_R = None if is_full else torch.tensor(slots)
        self.biases.clear()

    def add_token(self) -> None:
        """Go on to the next new token of every row."""
        self.length += 1
        self.biases = {window: bias for window, bias in self.biases.items() if window is None}

    def _bias(self, window: int | None) -> Tensor | None:
        """Return the bias (B, 1, 1, P) of a new token's scores with its prompt: -inf for padding, and for what is
        before the window. None where every token is seen."""
        if window not in self.biases:
            key = next(iter(self.prompt_keys.values()))
            order_P, lengths_B1 = torch.arange(key.shape[2]), torch.tensor(self.lengths)[:, None]
            sees_BP = order_P < lengths_B1
            if window is not None:
                sees_BP &= order_P > lengths_B1 + self.length - window
            bias_BP = torch.zeros_like(sees_BP, dtype=key.dtype).masked_fill(~sees_BP, -torch.inf)
            self.biases[window] = None if bool(sees_BP.all()) else bias_BP[:, None, None]
        return self.biases[window]

    def __call__(self, layer: Layer, query_RA1E: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> Tensor:
        rows, heads, _, size = query_RA1E.shape
        query_RJQE = query_RA1E.view(rows, key_RJ1E.shape[1], -1, size)
        own_RJQE, own_lse_RJQ = self.over_own(layer, query_RJQE, key_RJ1E, value_RJ1E)
        window = layer.sight.window
        if window is not None and self.length >= window - 1:  # the window begins after the prompts
            return own_RJQE.reshape(rows, heads, 1, size)
        prompt_RJQE, prompt_lse_RJQ = self._over_prompts(layer, query_RJQE)
        weight_RJQ1 = torch.sigmoid(own_lse_RJQ - prompt_lse_RJQ)[..., None].to(own_RJQE.dtype)
        return torch.lerp(prompt_RJQE, own_RJQE, weight_RJQ1).reshape(rows, heads, 1, size)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        return scan.step(tokens, self.states[layer])

    def over_own(self, layer: Layer, query_RJQE: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> tuple[Tensor, Tensor]:
        """Store the key and value of the new token. Returns output and log-sum-exp of every row over its own tokens."""
        own_key, own_value = self.own_keys[layer.index], self.own_values[layer.index]
        own_key[:, :, self.length] = key_RJ1E[:, :, 0]
        own_value[:, :, self.length] = value_RJ1E[:, :, 0]
        first = 0 if layer.sight.window is None else max(0, self.length + 1 - layer.sight.window)
        seen = slice(first, self.length + 1)
        return attention(query_RJQE, own_key[:, :, seen], own_value[:, :, seen], None, layer.scale)

    def _over_prompts(self, layer: Layer, query_RJQE: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of every row over its prompt. All rows of a prompt are queries of one
        attention."""
        _, key_heads, queries, size = query_RJQE.shape
        prompts = len(self.lengths)
        slots = query_RJQE
        if self.slots_R is not None:
            slots = query_RJQE.new_zeros(prompts * self.most, key_heads, queries, size)
            slots[self.slots_R] = query_RJQE
        query = slots.view(prompts, self.most, key_heads, queries, size).transpose(1, 2)
        output, lse = attention(
            query.reshape(prompts, key_heads, self.most * queries, size),
            self.prompt_keys[layer.index],
            self.prompt_values[layer.index],
            self._bias(layer.sight.window),
            layer.scale,
        )
        output = output.view(prompts, key_heads, self.most, queries, size).transpose(1, 2).flatten(0, 1)
        lse = lse.view(prompts, key_heads, self.most, queries).transpose(1, 2).flatten(0, 1)
        return (output, lse) if self.slots_R is None else (output[self.slots_R], lse[self.slots_R])


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention with `bias` added to the scores. Returns output (..., queries, E) and log-sum-exp (...,
    queries)."""
    if bias is not None:
        bias = bias.expand(query.shape[0], 1, query.shape[2], key.shape[2])
    output, lse = _flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return output.contiguous(), lse.contiguous()


def slots_of(prompt_of: Sequence[int], most: int) -> list[int]:
    """Return the place of each row where every prompt has `most` places. `prompt_of`: the prompt of each row."""
    taken: Counter[int] = Counter()
    slots = []
    for prompt in prompt_of:
        slots.append(prompt * most + taken[prompt])
        taken[prompt] += 1
    return slots


class SharedDecoder(BaseDecoder):
    """Runs each prompt once for its group, on a CPU. The memory of all new tokens is allocated before the first one."""

    def __init__(self, policy: Policy, vision: VisionStore):
        super().__init__(policy, vision)
        self.release()

    def prefill(self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int) -> Tensor:
        padded = self.padded(prompts)
        self.positions_R = padded.starts_B.repeat_interleave(group_size)
        self.attention = DecodeAttention(padded.lengths, group_size, max_new_tokens)
        hidden_BPH = self.hidden_states(padded, PrefillAttention(self.attention, padded))
        self.attention.arrange()
        return self.logits_after(padded, hidden_BPH)

    def step(self, token_ids_R: Tensor) -> Tensor:
        logits_RV = self.logits(self.new_hidden_states(token_ids_R, self.positions_R, self.attention))
        self.attention.add_token()
        self.positions_R += 1
        return logits_RV

    def keep(self, kept: Sequence[int]) -> None:
        self.positions_R = self.positions_R[kept]
        self.attention.keep(kept)

    @property
    def held_bytes(self) -> int:
        held = self.attention
        tensors = (held.prompt_keys, held.prompt_values, held.own_keys, held.own_values)
        return sum(tensor.nbytes for by_layer in tensors for tensor in by_layer.values())

    def release(self) -> None:
        self.attention = DecodeAttention((), 0, 0)


class RepeatedDecoder(BaseDecoder):
    """Decodes with the cache of transformers. Each prompt's keys and values are repeated for every row."""

    def __init__(self, policy: Policy, vision: VisionStore):
        super().__init__(policy, vision)
        self.release()

    def prefill(self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int) -> Tensor:
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

    def _masks(self, mask: Callable[[Sight], Tensor | None]) -> Tensor | dict[str, Tensor | None] | None:
        """Return the mask of all layers, or those of each kind of layer."""
        sights = sights_of(self.language_model.config)
        if "sliding_attention" in sights:
            return {kind: mask(sight) for kind, sight in sights.items()}
        return mask(sights.get("full_attention", FULL))

    def _step_mask(self, sight: Sight) -> Tensor:
        """Return the mask (R, 1, 1, P) of the newest token."""
        sees_RP = self.order_RP >= 0
        if sight.window is not None:
            sees_RP &= self.order_RP > self.lengths_R[:, None] - sight.window
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
        kept_R = moved(torch.tensor(kept), self.positions_R.device)
        self.cache.batch_select_indices(kept_R)
        self.positions_R, self.lengths_R = self.positions_R[kept_R], self.lengths_R[kept_R]
        self.order_RP = self.order_RP[kept_R]

    @property
    def held_bytes(self) -> int:
        layers: list[Any] = list(self.cache.layers)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def release(self) -> None:
        self.cache = DynamicCache()

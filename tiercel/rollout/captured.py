"""The shared decoder with its step as a captured CUDA graph: one launch per token in place of thousands.

A graph repeats the same kernels on the same memory, so all that changes from token to token lies in tensors: how many
tokens there are, the positions, the drawn ids. Rows leave only when more than half of them have ended, for every new
number of rows is a new capture. Shape suffixes as in `decoding`.
"""

from collections.abc import Callable
from warnings import warn

import torch
from torch import Tensor

from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.rollout.decoding import DecodeAttention, PrefillAttention, SharedDecoder, attention

Step = Callable[[Tensor], Tensor]
WARM_UP_STEPS = 2  # libraries choose their kernels and allocate their workspaces outside the graph


class CapturedStep:
    """A step replayed from a graph; its input and output stay where they were at capture."""

    def __init__(self, step: Step, token_ids_R: Tensor):
        self.token_ids_R = token_ids_R.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits_RV = step(self.token_ids_R)

    def __call__(self, token_ids_R: Tensor) -> Tensor:
        self.token_ids_R.copy_(token_ids_R)
        self.graph.replay()
        return self.logits_RV


class CapturedDecoder(SharedDecoder):
    """Captures at the first token after the number of rows has changed. `capture` is `CapturedStep` but in tests."""

    patience = 0.5
    keeps_casts = False

    def __init__(self, policy: Policy, vision: VisionStore, capture: Callable[[Step, Tensor], Step] = CapturedStep):
        super().__init__(policy, vision)
        self.capture = capture
        self.captured: Step | None = None

    def make_attention(
        self, prefilled: PrefillAttention, lengths_B: Tensor, group_size: int, max_new_tokens: int
    ) -> DecodeAttention:
        self.captured = None
        return StaticDecodeAttention(prefilled, lengths_B, group_size, max_new_tokens)

    def step(self, token_ids_R: Tensor) -> Tensor:
        if self.captured is None:
            self._warm_up(token_ids_R)
            try:
                self.captured = self.capture(self._eager_step, token_ids_R)
            except RuntimeError as error:  # what CUDA raises for an operation that no graph can hold
                warn(f"decoding goes on without a CUDA graph, slower: {error}", RuntimeWarning, stacklevel=2)
                self.captured = self._eager_step
        return self.captured(token_ids_R)

    def keep(self, kept: Tensor) -> None:
        self.captured = None
        super().keep(kept)

    def _eager_step(self, token_ids_R: Tensor) -> Tensor:
        assert isinstance(self.attention, StaticDecodeAttention)
        self.attention.look_at_new_token()
        return super().step(token_ids_R)

    def _warm_up(self, token_ids_R: Tensor) -> None:
        """Steps whose traces are undone: what they wrote to memory is overwritten by the next."""
        assert isinstance(self.attention, StaticDecodeAttention)
        positions_R, length_1 = self.positions_R.clone(), self.attention.length_1.clone()
        for _ in range(WARM_UP_STEPS if token_ids_R.is_cuda else 1):
            self._eager_step(token_ids_R)
            self.positions_R.copy_(positions_R)
            self.attention.length_1.copy_(length_1)


class StaticDecodeAttention(DecodeAttention):
    """Over memory of one size: how much of it counts is a tensor."""

    def __init__(self, prefilled: PrefillAttention, lengths_B: Tensor, group_size: int, max_new_tokens: int):
        super().__init__(prefilled, lengths_B, group_size, max_new_tokens)
        self.length = max_new_tokens  # all of it moves when rows leave
        self.order_L = torch.arange(max_new_tokens, device=lengths_B.device)
        self.length_1 = torch.full((1,), -1, device=lengths_B.device)  # place of the newest token
        for memory in (*self.own_keys, *self.own_values):
            memory.zero_()  # what is not seen is multiplied by 0, and must be a number

    def look_at_new_token(self) -> None:
        """One place more of every row counts from here on."""
        self.length_1 += 1
        sees_L = self.order_L <= self.length_1
        dtype = self.own_keys[0].dtype
        self.bias_111L = torch.zeros_like(sees_L, dtype=dtype).masked_fill(~sees_L, -torch.inf)[None, None, None]

    def over_own(
        self, layer: int, query_RJQE: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        own_key, own_value = self.own_keys[layer], self.own_values[layer]
        own_key.index_copy_(2, self.length_1, key_RJ1E)
        own_value.index_copy_(2, self.length_1, value_RJ1E)
        return attention(query_RJQE, own_key, own_value, self.bias_111L, scale)

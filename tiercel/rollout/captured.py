"""The shared decoder with its step as a captured CUDA graph: one launch for each token instead of thousands.

A graph repeats the same kernels on the same memory. So everything that changes from token to token is in tensors: the
number of tokens, the positions, the drawn ids. Rows are removed only when more than half of them have ended, because
every new number of rows needs a new capture. Shape suffixes: docs/shapes.md.
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
    """Replays a step from a graph. Input and output have the memory that they had at the capture."""

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
    """Captures its step at the first token after the number of rows has changed. `capture`: another function only in
    tests."""

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
            except RuntimeError as error:  # from CUDA, for an operation that a graph cannot have
                warn(f"decoding continues without a CUDA graph, which is slower: {error}", RuntimeWarning, stacklevel=2)
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
        """Run steps and reset the positions after each. The next step overwrites the memory that they wrote."""
        assert isinstance(self.attention, StaticDecodeAttention)
        positions_R, length_1 = self.positions_R.clone(), self.attention.length_1.clone()
        for _ in range(WARM_UP_STEPS if token_ids_R.is_cuda else 1):
            self._eager_step(token_ids_R)
            self.positions_R.copy_(positions_R)
            self.attention.length_1.copy_(length_1)


class StaticDecodeAttention(DecodeAttention):
    """Computes decode attention over memory of a fixed size. A tensor tells how much of it is in use."""

    def __init__(self, prefilled: PrefillAttention, lengths_B: Tensor, group_size: int, max_new_tokens: int):
        super().__init__(prefilled, lengths_B, group_size, max_new_tokens)
        self.length = max_new_tokens  # `keep` copies all of it
        self.order_L = torch.arange(max_new_tokens, device=lengths_B.device)
        self.length_1 = torch.full((1,), -1, device=lengths_B.device)  # place of the newest token
        for memory in (*self.own_keys.values(), *self.own_values.values()):
            memory.zero_()  # masked values are multiplied by 0, so they must be finite

    def look_at_new_token(self) -> None:
        """Add one place of every row to those in use."""
        self.length_1 += 1
        sees_L = self.order_L <= self.length_1
        dtype = next(iter(self.own_keys.values())).dtype
        self.bias_111L = torch.zeros_like(sees_L, dtype=dtype).masked_fill(~sees_L, -torch.inf)[None, None, None]

    def over_own(
        self, layer: int, query_RJQE: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        own_key, own_value = self.own_keys[layer], self.own_values[layer]
        own_key.index_copy_(2, self.length_1, key_RJ1E)
        own_value.index_copy_(2, self.length_1, value_RJ1E)
        return attention(query_RJQE, own_key, own_value, self.bias_111L, scale)

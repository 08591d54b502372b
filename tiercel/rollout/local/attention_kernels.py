"""Attention of one new token in every row, over memory of a fixed size; tensors say how much of it is in use.

The host does not know these numbers, so a captured graph is right for all of them. `FlashKernel` is FlashAttention in
its form for sequences of different lengths, which PyTorch has for half precision on CUDA: scores are never rounded, and
only what is in use is read. `ExactKernel` computes scores in float32 over the whole memory. It serves all other devices
and dtypes, and `FlashKernel` is compared with it. Shape suffixes: docs/shapes.md. B are prompts, R the rows that are
being decoded.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.models.layers.float32_scores import HALF, wide_scores

LARGEST_HEAD = 256  # FlashAttention's
_flash = torch.ops.aten._flash_attention_forward

Attended = tuple[Tensor, Tensor]  # output (R, J, Q, E) and log-sum-exp (R, J, Q), fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptParts:
    """The part of its prompt that each row sees."""

    starts: Tensor  # int32 (R + 1,), the first token in memory that is seen, and where all prompts end
    used_R: Tensor  # int32, tokens that are seen


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlaces:
    """Where prompts and rows are in memory. The numbers change; the tensors stay where they are."""

    group_size: int  # rows of a prompt, at most
    lengths_B: Tensor  # int32, tokens of each prompt that are seen
    bounds: Tensor  # int32 (B + 1,), the number of each prompt's first row, and of all rows
    prompt_starts: Tensor  # int32 (B + 1,), the first token of each prompt in memory that is seen, and where all end
    slots_R: Tensor  # int64, the place of each row if every prompt has `group_size` places
    used_R: Tensor  # int32, new tokens of each row that are seen
    row_order: Tensor  # int32 (R + 1,): 0, 1, 2, ..
    own_starts: Tensor  # int32 (R + 1,), the first new token of each row in memory that is seen, and where all end
    may_see_nothing: bool = False  # of a prompt
    are_ragged: bool = False  # rows have different numbers of new tokens
    prompt_parts: "PromptParts | None" = None  # set if each row sees another part of its prompt
    query_bounds: tuple[int, Tensor] | None = None  # queries of a row in each key head, and `bounds` times these

    def with_queries(self, queries: int) -> "CachePlaces":
        """Compute the bounds of the prompts' queries, which layers then share."""
        return replace(self, query_bounds=(queries, self.bounds * queries))

    def of(self, rows: int) -> "CachePlaces":
        """Return the places of the first rows."""
        return replace(
            self,
            slots_R=self.slots_R[:rows],
            used_R=self.used_R[:rows],
            row_order=self.row_order[: rows + 1],
            own_starts=self.own_starts[: rows + 1],
        )

    def within(self, window: int) -> "CachePlaces":
        """Return the places of what the newest token of each row sees."""
        unseen_R = (self.used_R - window).clamp_min(0)
        own = replace(self, used_R=self.used_R - unseen_R, own_starts=_moved_on(self.own_starts, unseen_R))
        if self.are_ragged:
            return replace(own, prompt_parts=self._parts_within(window), may_see_nothing=True)
        unseen_B = self.lengths_B.minimum((self.lengths_B + self.used_R[:1] - window).clamp_min(0))
        return replace(
            own,
            lengths_B=self.lengths_B - unseen_B,
            prompt_starts=_moved_on(self.prompt_starts, unseen_B),
            may_see_nothing=True,
        )

    def _parts_within(self, window: int) -> "PromptParts":
        prompt_R = self.slots_R // self.group_size
        lengths_R, starts_R = self.lengths_B[prompt_R], self.prompt_starts[prompt_R]
        unseen_R = lengths_R.minimum((lengths_R + self.used_R - window).clamp_min(0))
        return PromptParts(
            starts=torch.cat([starts_R + unseen_R, self.prompt_starts[-1:]]), used_R=lengths_R - unseen_R
        )


def _moved_on(starts: Tensor, by: Tensor) -> Tensor:
    """Move all starts except the last, which is where the memory ends."""
    return torch.cat([starts[:-1] + by, starts[-1:]])


class ExactKernel:
    """Attention with scores and softmax in float32."""

    def memory(self, like: Tensor, sequences: int, tokens: int) -> Tensor:
        """Allocate zeros (sequences, J, tokens, E) in the layout that is read without a copy. `like` is (B, J, P,
        E)."""
        return like.new_zeros(sequences, like.shape[1], tokens, like.shape[3])

    def put(self, memory_RJLE: Tensor, place_1: Tensor, new_RJ1E: Tensor) -> None:
        """Write a token of every row."""
        memory_RJLE.index_copy_(2, place_1, new_RJ1E)

    def over_own(
        self, query_RJQE: Tensor, key_RJLE: Tensor, value_RJLE: Tensor, places: CachePlaces, scale: float
    ) -> Attended:
        """Attend to the row's own new tokens."""
        starts_R1 = places.own_starts[: len(query_RJQE), None]
        return _attention(query_RJQE, key_RJLE, value_RJLE, starts_R1, places.used_R[:, None], scale)

    def over_prompts(
        self, query_RJQE: Tensor, key_BJPE: Tensor, value_BJPE: Tensor, places: CachePlaces, scale: float
    ) -> Attended:
        """Attend to the row's prompt. A prompt is read once for all its rows."""
        _, heads, queries, size = query_RJQE.shape
        prompts, most = len(key_BJPE), places.group_size
        slots = query_RJQE.new_zeros(prompts * most, heads, queries, size).index_copy_(0, places.slots_R, query_RJQE)
        query = slots.view(prompts, most, heads, queries, size).transpose(1, 2).flatten(2, 3)
        starts, used = places.prompt_starts[:prompts, None], places.lengths_B[:, None]
        if (parts := places.prompt_parts) is not None:  # of each query
            starts, used = (
                numbers.new_zeros(prompts * most)
                .index_copy_(0, places.slots_R, numbers[: len(query_RJQE)])
                .view(prompts, most)
                .repeat_interleave(queries, 1)
                for numbers in (parts.starts, parts.used_R)
            )
        output, lse = _attention(query, key_BJPE, value_BJPE, starts, used, scale)
        output = output.unflatten(2, (most, queries)).transpose(1, 2).flatten(0, 1)
        lse = lse.unflatten(2, (most, queries)).transpose(1, 2).flatten(0, 1)
        return output.index_select(0, places.slots_R), lse.index_select(0, places.slots_R)


class FlashSpans(NamedTuple):
    """Which queries attend to which tokens, by sequence."""

    query_bounds: Tensor  # where the queries of each sequence begin, and where all end
    most_queries: int  # of a sequence
    starts: Tensor  # where the tokens of each sequence begin, and where all end
    used: Tensor  # tokens of each sequence that are in use


class FlashKernel:
    """FlashAttention on sequences that lie one after another. Their tokens are contiguous, all heads of a token side by
    side."""

    def memory(self, like: Tensor, sequences: int, tokens: int) -> Tensor:
        return like.new_zeros(sequences, tokens, like.shape[1], like.shape[3]).transpose(1, 2)

    def put(self, memory_RJLE: Tensor, place_1: Tensor, new_RJ1E: Tensor) -> None:
        """Write in the layout of the memory: in a compiled layer, PyTorch would take the result for one of another."""
        memory_RJLE.transpose(1, 2).index_copy_(1, place_1, new_RJ1E.transpose(1, 2))

    def over_own(
        self, query_RJQE: Tensor, key_RJLE: Tensor, value_RJLE: Tensor, places: CachePlaces, scale: float
    ) -> Attended:
        """Pass all query heads at once: with one query per row, the kernel joins the heads that share a key head, and
        divides long rows."""
        rows, heads, queries, size = query_RJQE.shape
        output, lse = _flash_sequences(
            query_RJQE.reshape(rows, heads * queries, size),
            key_RJLE,
            value_RJLE,
            FlashSpans(places.row_order, 1, places.own_starts, places.used_R),
            scale,
        )
        return output.view(query_RJQE.shape), lse.T.unflatten(1, (heads, queries))

    def over_prompts(
        self, query_RJQE: Tensor, key_BJPE: Tensor, value_BJPE: Tensor, places: CachePlaces, scale: float
    ) -> Attended:
        """Pass the query heads that share a key head as queries of their own, so that a prompt's keys are read once."""
        rows, heads, queries, size = query_RJQE.shape
        if (parts := places.prompt_parts) is not None:  # rows of a prompt then do not share a read
            of_rows = replace(places, own_starts=parts.starts, used_R=parts.used_R)
            output, lse = self.over_own(query_RJQE, key_BJPE, value_BJPE, of_rows, scale)
            return output, lse.masked_fill(lse == torch.inf, -torch.inf)
        known = places if places.query_bounds is not None else places.with_queries(queries)
        assert known.query_bounds is not None and known.query_bounds[0] == queries
        output, lse = _flash_sequences(
            query_RJQE.transpose(1, 2).reshape(rows * queries, heads, size),
            key_BJPE,
            value_BJPE,
            FlashSpans(known.query_bounds[1], places.group_size * queries, places.prompt_starts, places.lengths_B),
            scale,
        )
        if places.may_see_nothing:  # the kernel then returns inf
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return (
            output.view(rows, queries, heads, size).transpose(1, 2),
            lse.view(heads, rows, queries).transpose(0, 1),
        )


Kernel = ExactKernel | FlashKernel  # a way to compute the attention of a new token of every row


def kernel_for(key: Tensor) -> Kernel:
    """Choose a kernel by the device, the dtype and the size of a head. FlashAttention needs a GPU of capability 8.0."""
    size = key.shape[-1]
    if not key.is_cuda or key.dtype not in HALF or size % 8 or size > LARGEST_HEAD:
        return ExactKernel()
    is_there = torch.backends.cuda.is_flash_attention_available()
    return FlashKernel() if is_there and torch.cuda.get_device_capability(key.device) >= (8, 0) else ExactKernel()


def _flash_sequences(
    query: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, spans: FlashSpans, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the kernel on queries (N, heads, E) of all sequences. Returns output (N, heads, E) and log-sum-exp (heads,
    N)."""
    longest = key_BJTE.shape[2]
    output, lse, *_ = _flash(
        query,
        _end_to_end(key_BJTE),
        _end_to_end(value_BJTE),
        spans.query_bounds,
        spans.starts,
        spans.most_queries,
        longest,
        0.0,  # dropout
        False,  # not causal
        False,
        scale=scale,
        seqused_k=spans.used,
    )
    return output, lse


def _end_to_end(memory_BJTE: Tensor) -> Tensor:
    """View the tokens of all sequences one after another, (B x T, J, E)."""
    return memory_BJTE.transpose(1, 2).view(-1, memory_BJTE.shape[1], memory_BJTE.shape[3])


def _attention(
    query_BJME: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, starts_BM: Tensor, used_BM: Tensor, scale: float
) -> Attended:
    """Compute attention over `used_BM` tokens from a start, for each query, or for each sequence if M is 1. The output
    of a query that sees nothing is 0, its log-sum-exp -inf."""
    sequences, _, length, _ = key_BJTE.shape
    order_BT = torch.arange(sequences * length, device=key_BJTE.device).view(sequences, length)  # in memory
    order_B1T, starts_BM1 = order_BT[:, None], starts_BM[..., None]
    is_unused_BMT = (order_B1T < starts_BM1) | (order_B1T >= starts_BM1 + used_BM[..., None])
    scores = wide_scores(query_BJME, key_BJTE).mul_(scale).masked_fill_(is_unused_BMT[:, None], -torch.inf)
    lse_BJM = scores.logsumexp(-1)
    weights = (scores - lse_BJM[..., None].clamp_min(torch.finfo(scores.dtype).min)).exp()
    return weights.to(value_BJTE.dtype) @ value_BJTE, lse_BJM

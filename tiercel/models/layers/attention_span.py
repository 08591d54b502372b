"""The part of a sequence that its tokens see, by the kind of layer. Shape suffixes: docs/shapes.md."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]  # start and stop


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpan:
    """How far the tokens of a layer see. With `window`, a token sees itself and the `window` - 1 tokens before it; None
    means all tokens before it. With `whole_pictures`, the tokens of a picture also see the later tokens of the
    picture."""

    window: int | None = None
    whole_pictures: bool = True

    def within(self, longest: int, picture_spans: Sequence[Span]) -> "AttentionSpan":
        """Return the simplest attention span that is equivalent for sequences of at most `longest` tokens whose
        pictures have these spans."""
        window = None if self.window is None or self.window >= longest else self.window
        return AttentionSpan(window=window, whole_pictures=self.whole_pictures and bool(picture_spans))

    @property
    def is_causal(self) -> bool:
        """Return whether each token sees exactly the tokens up to and including itself."""
        return self.window is None and not self.whole_pictures


FULL = AttentionSpan()


def seen_spans(attention_span: AttentionSpan, length: int, picture_spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Return the start and the stop, int64 (T,), of the span that each token of a sequence sees."""
    order_T = torch.arange(length)
    start_T = (
        torch.zeros_like(order_T)
        if attention_span.window is None
        else (order_T - attention_span.window + 1).clamp_min(0)
    )
    stop_T = order_T + 1
    for start, stop in picture_spans if attention_span.whole_pictures else ():
        stop_T[start:stop] = stop
    return start_T, stop_T


def sequence_masks(attention_span: AttentionSpan, length: int, picture_spans: Sequence[Sequence[Span]]) -> Tensor:
    """Return the masks, bool (R, 1, T, T), of rows aligned at their start. `picture_spans` are the spans of each
    row."""
    order_T = torch.arange(length)
    masks = []
    for of_row in picture_spans:
        start_T, stop_T = seen_spans(attention_span, length, of_row)
        masks.append((order_T >= start_T[:, None]) & (order_T < stop_T[:, None]))
    return torch.stack(masks)[:, None]


def runs(is_true_T: Tensor) -> tuple[Span, ...]:
    """Return the maximal spans of a sequence in which all entries are true."""
    edges = torch.nn.functional.pad(is_true_T.int(), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))

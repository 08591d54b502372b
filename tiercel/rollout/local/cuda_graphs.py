"""The decoder of an accelerator: memory and captured CUDA graphs that outlast a batch.

A captured step is one launch for each token instead of thousands. A graph repeats the same kernels on the same memory,
so everything that changes from token to token is in tensors: the number of tokens, the positions, the drawn ids. There
is a graph for each number of rows that occurs. Each such number is half of the one before, so there are few. Shape
suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from warnings import warn

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from tiercel.devices import moved
from tiercel.models.layers.attention import AttentionForm
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.packing.compiling import like_later_inputs, running_regions
from tiercel.reliability.card_faults import plain_reason
from tiercel.rollout.local.compiled_layers import CompiledStep
from tiercel.rollout.local.decoding import RowDecoder
from tiercel.rollout.local.paused_rows import RowState
from tiercel.rollout.local.prefill import PaddedPrompts, PrefillAttention
from tiercel.rollout.local.static_cache import BatchSize, FixedMemory
from tiercel.types import EncodedPrompt

Step = Callable[[Tensor], Tensor]
WARM_UP_STEPS = 2  # libraries choose their kernels and allocate their workspaces outside the graph
FEWEST_ROWS = 8  # with fewer rows a step takes as long
MOST_STEPS = 32  # graphs kept


class CapturedStep:
    """A step that is replayed from a graph. Input and output have the memory that they had at the capture. `beside` is
    another graph whose workspace is shared, since one runs after the other."""

    def __init__(self, step: Step, token_ids_R: Tensor, beside: "CapturedStep | None"):
        self.token_ids_R = token_ids_R.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=None if beside is None else beside.graph.pool()):
            self.logits_RV = step(self.token_ids_R)

    def __call__(self, token_ids_R: Tensor) -> Tensor:
        self.token_ids_R.copy_(token_ids_R)
        self.graph.replay()
        return self.logits_RV


Capture = Callable[[Step, Tensor, CapturedStep | None], CapturedStep]


class FixedDecoder(RowDecoder):
    """Decoder that runs each prompt once for its group, in memory that is kept from batch to batch. `capture` makes a
    graph of a step; None: steps are not captured. `backend` compiles the layers of a step; None: it is not compiled."""

    def __init__(
        self,
        policy: Policy,
        vision: VisionStore,
        capture: Capture | None = CapturedStep,
        backend: Any = None,
    ):
        super().__init__(policy, vision)
        self.capture = capture
        self.backend = backend
        self.compiled = None if backend is None else CompiledStep(self.language_model, backend)
        self.memory: FixedMemory | None = None
        self.steps: dict[int, CapturedStep] = {}  # by number of rows
        self.made_for: tuple[object, ...] = ()
        self.keeps_casts = capture is None

    def prefill(
        self, prompts: Sequence[EncodedPrompt], group_size: int, max_new_tokens: int, *, rows_return: bool = False
    ) -> Tensor:
        padded = self.padded(prompts)
        room = BatchSize(
            prompts=len(prompts),
            prompt_tokens=max(padded.lengths),
            group_size=group_size,
            new_tokens=max_new_tokens,
        )
        memory = self._memory_for(room, rows_return)
        memory.begin(padded.lengths, group_size, max_new_tokens if rows_return else None)
        self.first_rows = room.rows
        self.positions_R[: room.rows] = padded.starts_B.repeat_interleave(group_size)
        return self.logits_after(padded, self.hidden_states(padded, PrefillAttention(memory, padded)))

    def hidden_states(self, prompts: PaddedPrompts, form: AttentionForm) -> Tensor:
        with running_regions(self.language_model):
            return super().hidden_states(prompts, form)

    def prompt_inputs(self, embeddings_BPH: Tensor) -> dict[str, Any]:
        inputs = super().prompt_inputs(embeddings_BPH)
        return inputs | {"inputs_embeds": like_later_inputs(inputs["inputs_embeds"])}

    def step(self, token_ids_R: Tensor) -> Tensor:
        assert self.memory is not None
        self.memory.length += 1
        rows = len(token_ids_R)
        if self.capture is not None and rows not in self.steps:
            self._capture(token_ids_R)
        return self.steps.get(rows, self._eager_step)(token_ids_R)

    def rows_for(self, going_on: int) -> int:
        rows = self.first_rows
        while (half := -(-rows // 2)) >= max(going_on, FEWEST_ROWS):
            rows = half
        return rows

    def keep(self, kept: Sequence[int]) -> None:
        assert self.memory is not None
        self.memory.keep(kept)
        kept_R = moved(torch.tensor(kept, dtype=torch.int64), self.positions_R.device)
        self.positions_R[: len(kept)] = self.positions_R[kept_R]

    @property
    def rows(self) -> FixedMemory:
        assert self.memory is not None
        return self.memory

    def put(self, rows: Sequence[RowState], order: Sequence[int]) -> None:
        present, room = len(self.rows.prompt_of), self.rows.room
        self.rows.append(rows)
        if self.rows.room != room:  # the captured steps have the addresses of the old memory
            self.steps.clear()
        positions = moved(torch.tensor([row.position for row in rows]), self.positions_R.device)
        self.positions_R[present : present + len(rows)] = positions
        self.keep(order)

    @property
    def held_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.held_bytes

    def release(self) -> None:
        self.memory = None
        self.steps.clear()

    def _memory_for(self, room: BatchSize, rows_return: bool) -> FixedMemory:
        """Return the memory of the previous batch if this batch fits, with the steps that were captured on it."""
        made_for = (rows_return, *self._addresses()) if self.capture is not None else ()
        if made_for != self.made_for:
            self.steps.clear()
            self.made_for = made_for
        if self.memory is None or not self.memory.room.holds(room):
            self.release()
            room, device = room.rounded(), self.policy.device
            self.memory = FixedMemory(room, device)
            self.positions_R = torch.zeros(room.rows, dtype=torch.int64, device=device)
        return self.memory

    def _addresses(self) -> tuple[object, ...]:
        """Return a value that changes if a captured step would read other weights than the policy's."""
        modules = (self.language_model, self.head)
        weights = [parameter.data_ptr() for module in modules for parameter in module.parameters()]
        adapters = [
            (layer.disable_adapters, *layer.active_adapters)
            for layer in self.language_model.modules()
            if isinstance(layer, LoraLayer)
        ]
        return (*weights, *adapters)

    def _capture(self, token_ids_R: Tensor) -> None:
        if len(self.steps) == MOST_STEPS:
            self.steps.clear()
        try:
            self._warm_up(token_ids_R)
        except (RuntimeError, FailOnRecompileLimitHit) as error:  # from the compiler
            if self.compiled is None or is_out_of_memory(error):
                raise
            reason = plain_reason(error)
            told = f"decoding continues with uncompiled layers, which is slower: {reason}"
            warn(told, RuntimeWarning, stacklevel=2)
            self.compiled = self.backend = None
            self._warm_up(token_ids_R)
        assert self.capture is not None
        beside = next(iter(self.steps.values()), None)
        stream = torch.cuda.current_stream() if token_ids_R.is_cuda else None
        try:
            self.steps[len(token_ids_R)] = self.capture(self._eager_step, token_ids_R, beside)
        except RuntimeError as error:  # from CUDA, for an operation that a graph cannot have
            warn(f"decoding continues without a CUDA graph, which is slower: {error}", RuntimeWarning, stacklevel=2)
            self.capture = None
            if stream is not None:
                torch.cuda.set_stream(stream)  # torch.cuda.graph leaves its own stream current if it fails

    def _eager_step(self, token_ids_R: Tensor) -> Tensor:
        assert self.memory is not None
        self.memory.add_token()
        rows = len(token_ids_R)
        positions_R = self.positions_R[:rows]
        with nullcontext() if self.compiled is None else self.compiled.running(self.memory, rows):
            logits_RV = self.logits(self.new_hidden_states(token_ids_R, positions_R, self.memory))
        positions_R += 1
        return logits_RV

    def _warm_up(self, token_ids_R: Tensor) -> None:
        """Run steps, and undo what they change."""
        assert self.memory is not None
        before = self.positions_R.clone()
        for _ in range(WARM_UP_STEPS if token_ids_R.is_cuda else 1):
            try:
                with self.memory.rehearsal():
                    self._eager_step(token_ids_R)
            finally:
                self.positions_R.copy_(before)

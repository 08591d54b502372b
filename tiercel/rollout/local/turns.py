"""Trajectories of the local engine: a row whose turn has ended leaves the batch, and comes back with what it observed.

On a GPU, a row comes back soon after its answer. On a CPU, and with `train.deterministic`, which rows share a batch
depends on the tokens alone, never on how long an answer takes, so that a run that is killed and resumed computes the
same bytes: rows come back at each JOIN_EVERY-th drawn token, after at least JOIN_EVERY, and the engine waits for their
answers there. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.families.base import Family
from tiercel.rollout.dialogue import TurnReply
from tiercel.rollout.local.decoding import Decoder, RowDecoder
from tiercel.rollout.local.paused_rows import ResumedTokens, RowState
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.token_sampling import TokenDraw
from tiercel.rollout.trajectory import BEAT_SECONDS, TrajectoryBuilder, awaited, completes_a_stop

JOIN_EVERY = 16  # drawn tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSettings:
    """What does not change from batch to batch."""

    family: Family
    params: SamplingParams
    is_deterministic: bool
    beat: Callable[[], None]


@dataclass(kw_only=True, slots=True)
class _Row:
    """A trajectory that is being sampled."""

    builder: TrajectoryBuilder
    token_ids: list[int] = field(default_factory=list)  # of the current turn
    logprobs: list[float] = field(default_factory=list)
    reply: "Future[TurnReply]" = field(default_factory=Future)  # to the previous turn
    left_at: int = 0  # drawn tokens when that turn ended
    state: RowState | None = None  # while the row is not in the batch

    def end_turn(self, drawn: int, *, is_truncated: bool) -> bool:
        """Request the answer to the current turn. Returns whether one will come."""
        reply = self.builder.add_turn(self.token_ids, self.logprobs, is_truncated=is_truncated)
        self.token_ids, self.logprobs, self.left_at = [], [], drawn
        if reply is not None:
            self.reply = reply
        return reply is not None

    def continuation(self) -> ResumedTokens:
        """Return the tokens that the row has not run."""
        state, self.state = self.state, None
        assert state is not None
        whole = self.builder.so_far()
        start = len(self.builder.prompt.token_ids_P) + state.length
        tokens = replace(
            whole,
            token_ids_P=whole.token_ids_P[start:],
            positions_DP=whole.positions_DP[:, start:],
            images=self.builder.observed,
            picture_spans=self.builder.family.picture_spans(whole.token_ids_P[start:]),
        )
        return ResumedTokens(state=state, tokens=tokens)


class _Turns:
    """The sampling of the turns of a batch's rows."""

    def __init__(
        self, settings: TurnSettings, decoder: Decoder, builders: Sequence[TrajectoryBuilder], logits_RV: Tensor
    ):
        self.settings = settings
        self.decoder = decoder
        self.rows = [_Row(builder=builder) for builder in builders]
        self.places = list(range(len(builders)))  # the row at each place of the decoder's batch
        self.writing = set(self.places)  # the other rows of the batch only fill it
        self.waiting: list[int] = []  # for an answer
        self.drawn = 0  # tokens that a row writing all the time would have
        self.logits_RV = logits_RV
        vocabulary, device = logits_RV.shape[1], logits_RV.device
        self.draw = TokenDraw(settings.params, settings.family, vocabulary, device, decoder.backend)

    def run(self) -> None:
        """Sample until all trajectories have ended."""
        while self.writing or self.waiting:
            if self.writing:
                drawn_R = self._end_turns(self._draw_tokens())
                if self.writing:
                    self.logits_RV = self.decoder.step(drawn_R)
                self.settings.beat()
            returning = self._returning()
            self.waiting = [number for number in self.waiting if number not in returning]
            if going_on := [number for number in returning if self._goes_on(self.rows[number])]:
                self._bring_back(going_on)

    def _draw_tokens(self) -> Tensor:
        """Draw a token for each row of the batch."""
        rows = [self.rows[number] for number in self.places]
        params, device = self.settings.params, self.logits_RV.device
        seeds_R = moved(torch.tensor([row.builder.seed for row in rows]), device)
        positions_R = moved(torch.tensor([len(row.builder.token_ids) + len(row.token_ids) for row in rows]), device)
        is_early = [len(row.token_ids) < row.builder.least(params.min_new_tokens) for row in rows]
        is_early_R = moved(torch.tensor(is_early), device) if any(is_early) else None
        drawn_R, logprobs_R = self.draw(self.logits_RV, seeds_R, positions_R, is_early_R)
        self.drawn += 1
        tokens = zip(drawn_R.tolist(), logprobs_R.tolist(), strict=True)
        for number, row, (token_id, logprob) in zip(self.places, rows, tokens, strict=True):
            if number in self.writing:
                row.token_ids.append(token_id)
                row.logprobs.append(logprob)
        return drawn_R

    def _stopped(self) -> set[int]:
        """Return the rows whose newest token ends the turn."""
        family, stop = self.settings.family, self.settings.params.stop
        turns = {number: self.rows[number].token_ids for number in self.writing}
        stopped = {number for number, token_ids in turns.items() if token_ids[-1] in family.checkpoint.end_token_ids}
        if stop:
            found = completes_a_stop(family, list(turns.values()), stop)
            stopped.update(number for number, is_found in zip(turns, found, strict=True) if is_found)
        return stopped

    def _end_turns(self, drawn_R: Tensor) -> Tensor:
        """Request the answers to turns that have ended, and remove their rows from the batch. Returns the tokens of the
        rows that stay."""
        stopped = self._stopped()
        full = {
            number for number in self.writing if len(self.rows[number].token_ids) == self.rows[number].builder.budget
        }
        leaving = sorted(stopped | full)
        if not leaving:
            return drawn_R
        asked = [n for n in leaving if self.rows[n].end_turn(self.drawn, is_truncated=n not in stopped)]
        if isinstance(self.decoder, RowDecoder):
            states = self.decoder.rows.take([self.places.index(number) for number in asked])
            for number, state in zip(asked, states, strict=True):
                self.rows[number].state = state
        self.waiting += asked
        self.writing.difference_update(leaving)
        if not self.writing:
            return drawn_R
        return drawn_R[self._keep({*self.writing, *self._fillers(self.places)})]

    def _fillers(self, numbers: Iterable[int]) -> list[int]:
        """Choose rows that do not write, as many as the decoder wants in addition to those that do."""
        others = [number for number in numbers if number not in self.writing]
        return others[: self.decoder.rows_for(len(self.writing)) - len(self.writing)]

    def _keep(self, numbers: Container[int]) -> Tensor:
        """Keep only these rows in the batch. Returns the places that they had."""
        kept = [place for place, number in enumerate(self.places) if number in numbers]
        if len(kept) < len(self.places):
            self.decoder.keep(kept)
        self.places = [self.places[place] for place in kept]
        return moved(torch.tensor(kept, dtype=torch.int64), self.logits_RV.device)

    def _returning(self) -> list[int]:
        """Return the waiting rows whose answers are used now. If no row writes, wait for some."""
        if not isinstance(self.decoder, RowDecoder):
            return [] if self.writing else self.waiting
        left_at = {number: self.rows[number].left_at for number in self.waiting}
        if self.settings.is_deterministic:
            if left_at and not self.writing:  # as if others had gone on writing until some rows may come back
                self.drawn = -(-min(left_at.values()) // JOIN_EVERY) * JOIN_EVERY + JOIN_EVERY
            is_look = self.drawn % JOIN_EVERY == 0
            return [number for number, drawn in left_at.items() if is_look and self.drawn - drawn >= JOIN_EVERY]
        if self.writing and self.drawn % JOIN_EVERY:
            return []
        replies = [self.rows[number].reply for number in self.waiting]
        while replies and not self.writing and not wait(replies, BEAT_SECONDS, FIRST_COMPLETED).done:
            self.settings.beat()
        return [number for number in self.waiting if self.rows[number].reply.done()]

    def _goes_on(self, row: _Row) -> bool:
        return row.builder.add_reply(awaited(row.reply, self.settings.beat))

    def _bring_back(self, numbers: Sequence[int]) -> None:
        """Run what these rows observed, and put them into the batch."""
        if not isinstance(self.decoder, RowDecoder):  # runs all of their tokens again
            prompts = [self.rows[number].builder.so_far() for number in numbers]
            self.logits_RV = self.decoder.prefill(prompts, 1, self.settings.params.max_new_tokens)
            self.places = list(numbers)
            self.writing.update(numbers)
            return
        states, fresh_RV = self.decoder.run([self.rows[number].continuation() for number in numbers])
        stayed_RV = self.logits_RV[self._keep(self.writing)]
        self.writing.update(numbers)
        fillers = self._fillers(range(len(self.rows)))
        states += [RowState(prompt=number // self.settings.params.group_size) for number in fillers]
        self.places += [*numbers, *fillers]
        order = sorted(range(len(self.places)), key=self.places.__getitem__)
        self.decoder.put(states, order)
        self.places.sort()
        empty_RV = fresh_RV.new_zeros(len(fillers), fresh_RV.shape[1])
        all_RV = torch.cat([stayed_RV, fresh_RV, empty_RV])
        self.logits_RV = all_RV[moved(torch.tensor(order), all_RV.device)]


def sample_turns(
    settings: TurnSettings, decoder: Decoder, builders: Sequence[TrajectoryBuilder], logits_RV: Tensor
) -> None:
    """Sample all turns of the rows of a batch. `logits_RV` are the ones after each row's prompt. A decoder whose rows
    cannot come back runs each row again from the start, when the turns of all rows have ended."""
    _Turns(settings, decoder, builders, logits_RV).run()

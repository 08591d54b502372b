"""The training rows step by step, encoded on each rank ahead of time; rows that cannot be encoded are recorded."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic

from tiercel.data.loader import Encode, Encoded, StepBatch, StepLoader, StepOrder, encode_rows
from tiercel.data.order import rank_slice
from tiercel.data.rejected_rows import require_few_bad, write_bad_rows
from tiercel.distributed.ranks import Ranks
from tiercel.errors import DataError
from tiercel.training.session import Session
from tiercel.training.step import Step


class StepBatches(Generic[Encoded]):
    """The rows of the remaining steps. All ranks call it together. A context manager: closing it ends the loader's
    workers."""

    def __init__(self, session: Session, encode: Encode[Encoded]):
        recipe, ranks = session.recipe, session.ranks
        order = session.table.order(recipe.train.seed, recipe.data)
        steps = StepOrder(
            rows=order,
            prompts_per_step=recipe.optim.prompts_per_step,
            end=session.length.end,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        start, stop, workers = session.start, session.length.steps, recipe.data.workers
        self._session, self._order = session, order
        self._encode: Encode[Encoded] = encode
        self._rejected = set[tuple[str, str]]()  # file and id, over all steps
        self._loader: StepLoader[Encoded] = StepLoader(
            session.table.rows, encode, steps, start=start, stop=stop, workers=workers
        )

    def __enter__(self) -> "StepBatches[Encoded]":
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def steps(self, *, ahead: int = 0) -> Iterator[Step]:
        """Yield each step with its rows and, with `ahead`, the prompts of that many later steps, each once. Raises
        DataError if too many rows of the run, or all rows of a step, were rejected."""
        session = self._session
        following = deque[StepBatch[Encoded]]()
        for number in range(session.start, session.length.steps):
            step = Step(number, session.ranks.heartbeat, partial(self.further, number))
            with step.phase("data"):
                step.batch = following.popleft() if following else next_batch(self._loader, session.ranks)
                more = min(ahead - len(following), self._loader.steps_left)
                upcoming = [next_batch(self._loader, session.ranks) for _ in range(more)]
                self._check(step.batch)
            following += upcoming
            step.upcoming = [batch.prompts for batch in upcoming]
            yield step

    def further(self, step: int, indices: Sequence[int]) -> StepBatch[Encoded]:
        """Encode further rows for a step right away: this rank's share of the rows at these global indices."""
        session, ranks = self._session, self._session.ranks
        places = [(index, self._order.row(index)) for index in rank_slice(indices, ranks.rank, ranks.world_size)]
        batch = ranks.run_on_all(lambda: encode_rows(step, session.table.rows, self._encode, places))
        batch = _with_all_rejected(batch, ranks)
        self._check(batch, may_be_empty=True)
        return batch

    def _check(self, batch: StepBatch[Encoded], *, may_be_empty: bool = False) -> None:
        """Record the rejected rows of a step, and stop if they are too many, or all unless the batch `may_be_empty`."""
        if not batch.rejected:
            return
        session, ranks, table = self._session, self._session.ranks, self._session.table
        if ranks.is_first:
            write_bad_rows(batch.rejected, session.run.bad_rows_file)
        self._rejected |= {(row.file, row.id) for row in batch.rejected}
        bad = len(table.rejected) + len(self._rejected)
        ranks.run_on_all(lambda: require_few_bad(bad, table.total, session.recipe.data, batch.rejected))
        has_any, first = may_be_empty or ranks.all_reduce_any(bool(batch.prompts)), batch.rejected[0]

        def require_any() -> None:
            if not has_any:
                raise DataError(
                    f"every row of step {batch.step + 1} was rejected; the first, {first.id}: {first.reason}"
                )

        ranks.run_on_all(require_any)


def next_batch(loader: StepLoader[Encoded], ranks: Ranks) -> StepBatch[Encoded]:
    """Return the loader's next step: this rank's rows, and the rejected rows of all ranks."""
    batch = ranks.run_on_all(lambda: next(loader))
    ranks.heartbeat.beat()
    return _with_all_rejected(batch, ranks)


def _with_all_rejected(batch: StepBatch[Encoded], ranks: Ranks) -> StepBatch[Encoded]:
    return replace(batch, rejected=tuple(row for rows in ranks.all_gather(batch.rejected) for row in rows))

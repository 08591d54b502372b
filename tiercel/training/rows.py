"""The rows of a run: read, checked to be the same on all ranks, their pictures looked for, the first of them decoded;
unusable rows are recorded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.data import reading
from tiercel.data.coverage import run_coverage
from tiercel.data.encoding import require_readable
from tiercel.data.odd_rows import odd_lines
from tiercel.data.order import rank_slice
from tiercel.data.picture_files import missing_files
from tiercel.data.rejected_rows import require_few_bad, write_bad_rows
from tiercel.data.row_table import CONTENT, RowTable, RunRows
from tiercel.data.scan import undecodable
from tiercel.data.stores import RowView, view_of
from tiercel.distributed.ranks import Ranks
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.directory import RunDirectory
from tiercel.types import RejectedRow, Row

ROWS = "rows"  # in a checkpoint's state: the identity of the rows that the run goes through in order
FIRST_ROWS = 32  # a megapixel takes 10 to 25 ms to decode, so with one per row this is half a second on one core
MOST_SOUGHT = 1 << 15  # rows of an index whose pictures are looked for; to read that many takes about two seconds
MOST_EMBEDDED = 1 << 26  # bytes of pictures in rows of an index, after which files of such rows are not read further


def read_run_rows(recipe: BaseRecipe, run: RunDirectory) -> RunRows:
    """Read the run's rows, and record rejected ones before they can stop the run. Reports how many rows a reward
    applies to if that is not all. Raises DataError if it applies to none."""
    rows = reading.read_run_rows(recipe.data, recipe.purpose, run.ranks.heartbeat.beat)
    for table in rows.tables:
        require_readable(recipe, table)
        if run.ranks.is_first:
            write_bad_rows(table.rejected, run.bad_rows_file)
        require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected)
        for line in odd_lines(recipe.data, table, is_learnt=recipe.purpose != "grpo"):
            logger.warning(line)
    for line in run_coverage(recipe.rewards, rows) if isinstance(recipe, GrpoRecipe) else ():
        logger.info(line)
    return rows


def require_same_rows(ranks: Ranks, rows: Mapping[str, Any]) -> None:
    """Raise DataError, on all ranks, if ranks have read different rows, because their orders would differ. A node may
    lack a picture, and a row without its picture is rejected. `rows` is the table's identity."""
    every = ranks.all_gather(rows)
    if odd := [rank for rank, each in enumerate(every) if each != every[0]]:
        counts = ", ".join(f"rank {rank}: {sum(every[rank]['counts'])}" for rank in (0, odd[0]))
        if _order(every[odd[0]]) == _order(every[0]):
            raise DataError(
                f"data.train: the rows of ranks 0 and {odd[0]} have the same ids, but different texts or answers; "
                "copy the same files to all machines"
            )
        raise DataError(
            f"data.train: the ranks accepted different rows ({counts}); make the same rows and images readable on "
            "every machine"
        )


def require_rows_of(found: FoundCheckpoint, *, rows: Mapping[str, Any]) -> None:
    """Raise DataError if the run had other rows before, because it would continue in another order. Reports rows that
    have the same ids but different content."""
    before = found.state.get(ROWS)
    if before is not None and CONTENT in before and before[CONTENT] != rows[CONTENT]:
        logger.warning(
            f"data.train: the texts, answers or columns of rows have changed since {found.path} was written; from "
            "here on, the run uses the new ones"
        )
    if before is not None and _order(before) != _order(rows):
        raise DataError(
            f"data.train: the usable rows or their order have changed since {found.path} was written ("
            f"{_counted(before)} then, {_counted(rows)} now), so the run would continue with different rows; restore "
            "the files and images (`tiercel check` names rejected rows), or name another output"
        )


def _order(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that determines the order."""
    return {name: rows[name] for name in ("counts", "sha256")}


def _counted(rows: Mapping[str, Any]) -> str:
    return " + ".join(map(str, rows["counts"])) + " rows"


def reject_undecodable_rows(recipe: BaseRecipe, table: RowTable, run: RunDirectory, step: int) -> None:
    """Decode the images of the first rows from a step on before weights are loaded, each rank its share, and record the
    rows that cannot be decoded. Raises DataError if they are too many, or all."""
    ranks = run.ranks
    order = table.order(recipe.train.seed, recipe.data)
    start = step * recipe.optim.prompts_per_step
    numbers = list(dict.fromkeys(order.row(index) for index in range(start, start + FIRST_ROWS)))
    found = [view_of(table.rows).look(number) for number in rank_slice(numbers, ranks.rank, ranks.world_size)]
    lost = [row for row in found if isinstance(row, RejectedRow)]
    undecoded = undecodable([row for row in found if isinstance(row, Row)], recipe.data)
    broken = [row for each in ranks.all_gather([*lost, *undecoded]) for row in each]
    if not broken:
        return
    ranks.run_on_first(lambda: write_bad_rows(broken, run.bad_rows_file))
    ranks.run_on_all(lambda: require_few_bad(len(table.rejected) + len(broken), table.total, recipe.data, broken))
    first = f"{broken[0].file}:{broken[0].line} ({broken[0].id}) {broken[0].reason}"
    if len(broken) == len(numbers):
        raise DataError(f"none of the first {len(broken)} rows can be used; the first: {first}")
    logger.warning(
        f"{len(broken)} of the first {len(numbers)} rows cannot be used, such as {first}; `tiercel check --decode` "
        "finds all"
    )


def reject_rows_without_media(recipe: BaseRecipe, table: RowTable, run: RunDirectory, step: int) -> None:
    """Record the rows that name a picture or video file that does not exist, before weights are loaded, each rank its
    share. If rows lie in an index, only MOST_SOUGHT are looked at, those that come first from a step on, and the log
    says so. Raises DataError if they are too many."""
    ranks, rows = run.ranks, view_of(table.rows)
    numbers: Sequence[int] = range(len(rows))
    is_indexed = any(store.key is not None for store in rows.stores)
    if len(rows) > MOST_SOUGHT and is_indexed:
        order, start = table.order(recipe.train.seed, recipe.data), step * recipe.optim.prompts_per_step
        numbers = list(dict.fromkeys(order.row(index) for index in range(start, start + MOST_SOUGHT)))
        logger.info(
            f"{table.file}: the run looks for the pictures of the {len(numbers):,} rows that come first; "
            f"`tiercel check` looks for those of all {len(rows):,} rows"
        )
    share = rank_slice(numbers, ranks.rank, ranks.world_size)
    found = (row for row in _looked_at(rows, share, is_indexed=is_indexed) if isinstance(row, Row))
    missing = [row for each in ranks.all_gather(missing_files(found, ranks.heartbeat.beat)) for row in each]
    if not missing:
        return
    ranks.run_on_first(lambda: write_bad_rows(missing, run.bad_rows_file))
    ranks.run_on_all(lambda: require_few_bad(len(table.rejected) + len(missing), table.total, recipe.data, missing))
    first = f"{missing[0].file}:{missing[0].line} ({missing[0].id}) {missing[0].reason}"
    logger.warning(f"files of {len(missing)} of {len(numbers)} rows do not exist, such as {first}")


def _looked_at(rows: RowView, numbers: Sequence[int], *, is_indexed: bool) -> Iterator[Row | RejectedRow]:
    """Yield the rows with these numbers. Of an index, once MOST_EMBEDDED bytes of pictures in rows were read, the other
    rows of files with such pictures are passed over: they name no files, and to find each one takes milliseconds."""
    files = rows.files
    passed_over, size = set[int](), 0
    for number in numbers:
        if is_indexed and size > MOST_EMBEDDED and int(files[number]) in passed_over:
            continue
        row = rows.look(number)
        if isinstance(row, Row):
            embedded = sum(len(picture.data or b"") for side in row.sides for picture in side.images)
            size += embedded
            if embedded:
                passed_over.add(int(files[number]))
        yield row

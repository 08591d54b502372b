"""Count the rows that each reward of a recipe applies to. A reward that applies to none would have no effect at all."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from tiercel.data.index import remembered
from tiercel.data.parallel_map import blocks_of, spread
from tiercel.data.row_table import RowTable, RunRows
from tiercel.data.stores import view_of
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.message_text import brief
from tiercel.reward_types import column
from tiercel.rewards.base import ANSWER, RewardEntry, TruthReward, column_text, is_meant
from tiercel.rewards.text import ALL_TEXT
from tiercel.types import Row

_ROWS_AT_ONCE = 1024
_LOOKED_AT = 32  # rows
_MOST_NAMED = 12  # the most columns or values in a message
_ANSWERS = ("solution", "label", "ground_truth", "answers", "target")  # usual names of the column with the right answer
_WORKED_OUT = re.compile(r"####|\\boxed\s*\{|</?(?:answer|think)>")  # marks of an answer inside a longer text


def rows_with_rewards(rewards: Sequence[RewardEntry], rows: Sequence[Row]) -> tuple[list[int], int]:
    """Count the rows that each reward applies to, as far as the rows can tell, and those that any does: your own
    function may still return None. Rows are read only if a reward depends on them."""
    if not any(reward.where is not None or isinstance(reward, TruthReward) for reward in rewards):
        return [len(rows)] * len(rewards), len(rows)

    def count(block: range) -> list[int]:
        each = [[_applies(reward, row) for reward in rewards] for row in map(rows.__getitem__, block)]
        return [*map(sum, zip(*each, strict=True)), sum(map(any, each))]

    counted = spread(count, blocks_of(len(rows), _ROWS_AT_ONCE))
    *counts, any_applies = map(sum, zip([0] * (1 + len(rewards)), *counted, strict=True))
    return counts, any_applies


def _applies(reward: RewardEntry, row: Row) -> bool:
    if not is_meant(reward, row.columns):
        return False
    return not isinstance(reward, TruthReward) or reward.truth_of(row.answer, row.columns) is not None


def run_coverage(rewards: Sequence[RewardEntry], rows: RunRows) -> list[str]:
    """Return a line for each reward that does not apply to every row, with the number of rows that it applies to.
    Raises DataError, naming all of them, if some rewards apply to no row that is trained on."""
    lines = _coverage(rewards, rows.train)
    if rows.heldout is not None:  # some of the held-out rows, which were chosen by ids, may lack a task
        try:
            lines += _coverage(rewards, rows.heldout)
        except DataError as error:
            lines += str(error).splitlines()
    return lines


def _coverage(rewards: Sequence[RewardEntry], table: RowTable) -> list[str]:
    """Return the lines of one table; of rows that are indexed, they are kept."""
    what = json.dumps(["coverage", table.file, [reward.model_dump(mode="json") for reward in rewards]])
    return list(remembered(view_of(table.rows), what, lambda: reward_coverage(rewards, table.rows, table.file)))


def reward_coverage(rewards: Sequence[RewardEntry], rows: Sequence[Row], file: str) -> list[str]:
    """Do the same for the rows of one table."""
    lines: list[str] = []
    faults: list[str] = []
    counts, any_applies = rows_with_rewards(rewards, rows)
    for index, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        name = f"rewards.{index} ({reward.title})"
        if not count:
            faults.append(f"{name}: applies to none of the {len(rows):,} rows of {file}: {_reason(reward, rows)}")
        elif count < len(rows):
            lines.append(f"{name}: applies to {count:,} of {len(rows):,} rows of {file}")
        lines += [f"{name}: {line}" for line in _worked_out(reward, rows)]
    if faults:
        raise DataError("\n".join(faults), field="rewards")
    if rewards and (without := len(rows) - any_applies):
        lines.append(told("rows without a reward", without, len(rows), file))
    return lines


def _worked_out(reward: RewardEntry, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line if a reward that compares whole texts has right answers with their solutions, as those of GSM8K."""
    if not isinstance(reward, TruthReward) or reward.reads != ALL_TEXT:
        return
    truths = [reward.truth_of(row.answer, row.columns) for row in rows[:_LOOKED_AT] if is_meant(reward, row.columns)]
    found = [text for text in truths if isinstance(text, str) and _WORKED_OUT.search(text)]
    if found:
        yield told("answers with solutions", len(found), len(truths), brief(found[0], 60))


def _reason(reward: RewardEntry, rows: Sequence[Row]) -> str:
    where = reward.where
    meant = [row for row in rows if is_meant(reward, row.columns)]
    if where is not None and not meant:
        values = Counter(column_text(value) for row in rows if (value := column(row.columns, where.column)) is not None)
        if not values:
            return f"where.column is {where.column}, but no row has this column{_there(where.column, rows)}"
        wanted, found = ", ".join(where.equals), _listed([brief(text, 40) for text in values])
        return f"where.equals is {wanted}, but {where.column} has the values {found}"
    among = "" if where is None else f" with {where.column} {' or '.join(where.equals)}"
    assert isinstance(reward, TruthReward)  # any other reward applies to all rows that it is meant for
    if reward.answer_column is None or reward.answer_column == ANSWER:
        alone = "; the rows have no other columns, and no turn is taken for it: add one named answer"
        there = _there(ANSWER, rows) or alone
        return f"no row{among} has a right answer; set answer_column to the column that has it{there}"
    return told("no column of the answer", reward.answer_column, among, _there(reward.answer_column, rows))


def _there(name: str, rows: Sequence[Row]) -> str:
    """List the columns that the rows have, the nearest first, including columns inside columns. If the column was left
    out, say so instead."""
    if (kind := next((kind for row in rows for left, kind in row.left_out if left == name), None)) is not None:
        return f", because its values have type {kind}, which JSON does not have; store them as text"
    names: dict[str, None] = {}
    for row in rows:
        if row.answer is not None:
            names[ANSWER] = None
        for key, value in row.columns.items():
            inner = value if isinstance(value, dict) else {}
            names.update(dict.fromkeys([key, *(f"{key}.{each}" for each in inner)] if value is not None else []))
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    if name == ANSWER:
        near = [key for key in names if key.rpartition(".")[2] in _ANSWERS]
    listed = _listed(list(dict.fromkeys([*near, *names])))
    return f"; the rows have the columns {listed}" if names else ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

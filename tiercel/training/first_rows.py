"""A look at the first pictures of a run, before weights are loaded for them."""

from collections.abc import Callable

from tiercel.config.schema import BaseRecipe
from tiercel.data.order import rank_slice
from tiercel.data.reading import RowTable, require_few_bad, write_bad_rows
from tiercel.data.scan import undecodable
from tiercel.errors import DataError
from tiercel.runs.directory import RunDirectory

FIRST_ROWS = 32  # a megapixel takes 10 to 25 ms to decode, so one in each row is half a second on one core


def try_first_rows(
    recipe: BaseRecipe, table: RowTable, run: RunDirectory, start: int, say: Callable[[str], None]
) -> None:
    """Decode the images of the rows from the global index `start` on, each rank its share, and record those that cannot
    be. Raises DataError where they are too many, or all."""
    ranks = run.ranks
    order = table.order(recipe.train.seed, recipe.data.shuffle)
    numbers = list(dict.fromkeys(order.row(index) for index in range(start, start + FIRST_ROWS)))
    rows = [table.rows[number] for number in rank_slice(numbers, ranks.rank, ranks.world_size)]
    broken = [row for each in ranks.gather(undecodable(rows, recipe.data)) for row in each]
    if not broken:
        return
    ranks.on_first(lambda: write_bad_rows(broken, run.bad_rows_file))
    ranks.together(lambda: require_few_bad(len(table.rejected) + len(broken), table.total, recipe.data, broken))
    first = f"{broken[0].file}:{broken[0].line} ({broken[0].id}) {broken[0].reason}"
    if len(broken) == len(numbers):
        raise DataError(f"none of the first {len(broken)} rows can be used; the first: {first}")
    say(
        f"{len(broken)} of the first {len(numbers)} rows cannot be used, such as {first}; `tiercel check --decode` "
        "finds all"
    )

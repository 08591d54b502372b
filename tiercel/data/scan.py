"""Check all rows before a run: the header or the pixels of every image, and the length of every prompt."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tiercel.config.schema import Data
from tiercel.data.media.images import ImageProblem, decode, open_header
from tiercel.data.reading import RowTable
from tiercel.data.rows import reject
from tiercel.data.stores import view_of
from tiercel.errors import DataError
from tiercel.types import ImageRoots, ImageSource, RejectedRow, Row, Size

PERCENTILES = (0, 50, 90, 99, 100)

Measure: TypeAlias = Callable[[ImageSource, ImageRoots, int], Size]  # reads an image's size; raises ImageProblem
_Place: TypeAlias = "tuple[ImageRoots, ImageSource]"
_BLOCK_ROWS = 256
_THREADS = 8  # reading waits for the disk or the network, and Pillow decodes without the interpreter's lock


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    """Holds the result of a scan of a table."""

    file: str
    total: int  # rows of the file
    accepted: int
    rejected: tuple[RejectedRow, ...]  # while the rows were read, and by the scan
    image_count: int  # of accepted rows; a file that several rows name is counted once for each
    rows_by_image_count: Mapping[int, int]  # number of accepted rows, by their number of images
    prompt_token_percentiles: Mapping[int, int]  # of accepted rows: PERCENTILES by nearest rank; may be empty
    longest_row: str | None  # id of the accepted row with the most prompt tokens


def scan(
    table: RowTable,
    plan_prompt: Callable[[Row, list[Size]], int],
    config: Data,
    progress: Callable[[int, int], None] | None = None,
    measure: Measure = open_header,
) -> ScanReport:
    """Check the images of every row, which `measure` opens, and the length of its prompt in tokens, which
    `plan_prompt(row, sizes)` returns.

    A row is rejected if `measure` or `plan_prompt` raises DataError, or if its prompt is longer than
    data.max_prompt_tokens. `progress` is called with (rows done, rows in all).
    """
    rejected = list(table.rejected)
    rows_by_image_count: Counter[int] = Counter()
    rows_by_length: Counter[int] = Counter()
    longest: tuple[int, str | None] = (-1, None)
    known: dict[_Place, Size | ImageProblem] = {}
    rows = view_of(table.rows)
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in range(0, len(rows), _BLOCK_ROWS):
            found = [rows.look(number) for number in range(done, min(done + _BLOCK_ROWS, len(rows)))]
            rejected += [row for row in found if isinstance(row, RejectedRow)]
            block = [row for row in found if isinstance(row, Row)]
            sizes = _sizes(block, known, partial(_size, measure, config.max_image_pixels), threads)
            known.update({place: size for place, size in sizes.items() if place[1].data is None})
            for row in block:
                try:
                    length = max(_prompt_length(side, sizes, plan_prompt, config) for side in row.sides)
                except DataError as error:
                    rejected.append(reject(row, error))
                    continue
                rows_by_image_count[len(row.images)] += 1
                rows_by_length[length] += 1
                if length > longest[0]:
                    longest = (length, row.id)
            if progress is not None:
                progress(done + len(found), len(rows))
    return ScanReport(
        file=table.file,
        total=table.total,
        accepted=rows_by_length.total(),
        rejected=tuple(sorted(rejected, key=lambda row: (row.file, row.line))),
        image_count=sum(images * rows for images, rows in rows_by_image_count.items()),
        rows_by_image_count=dict(sorted(rows_by_image_count.items())),
        prompt_token_percentiles=percentiles(rows_by_length),
        longest_row=longest[1],
    )


def decoded_size(image: ImageSource, roots: ImageRoots, max_pixels: int) -> Size:
    """Decode an image and return its size. Raises ImageProblem."""
    return decode(image, roots, max_pixels).size


def undecodable(rows: Sequence[Row], config: Data) -> list[RejectedRow]:
    """Return a RejectedRow for each row with an image that cannot be decoded."""
    with ThreadPoolExecutor(_THREADS) as threads:
        sizes = _sizes(rows, {}, partial(_size, decoded_size, config.max_image_pixels), threads)
    found: list[RejectedRow] = []
    for row in rows:
        problems = (sizes[row.image_roots, image] for side in row.sides for image in side.images)
        problem = next((problem for problem in problems if isinstance(problem, ImageProblem)), None)
        if problem is not None:
            found.append(reject(row, problem))
    return found


def percentiles(counts: Mapping[int, int]) -> dict[int, int]:
    """Compute PERCENTILES by nearest rank. `counts` has how often each value occurs. Empty if there are no values."""
    total = sum(counts.values())
    ranks = [max(1, -(-percent * total // 100)) for percent in PERCENTILES]  # rounded up
    found: dict[int, int] = {}
    seen = 0
    for value, count in sorted(counts.items()):
        seen += count
        for percent, rank in zip(PERCENTILES, ranks, strict=True):
            if seen >= rank:
                found.setdefault(percent, value)
    return found


def _prompt_length(
    row: Row,
    sizes: Mapping[_Place, Size | ImageProblem],
    plan_prompt: Callable[[Row, list[Size]], int],
    config: Data,
) -> int:
    row_sizes = []
    for image in row.images:
        size = sizes[row.image_roots, image]
        if isinstance(size, ImageProblem):
            raise size.with_traceback(None)  # the same problem may be raised for many rows
        row_sizes.append(size)
    length = plan_prompt(row, row_sizes)
    if length > config.max_prompt_tokens:
        raise DataError(
            f"has {length} tokens, more than data.max_prompt_tokens = {config.max_prompt_tokens}; raise it, or lower "
            "model.max_pixels",
            field="messages",
        )
    return length


def _sizes(
    rows: Sequence[Row],
    known: Mapping[_Place, Size | ImageProblem],
    size_of: Callable[[_Place], Size | ImageProblem],
    threads: Executor,
) -> dict[_Place, Size | ImageProblem]:
    """Return the size of each distinct image of the rows, or its problem."""
    images = dict.fromkeys((row.image_roots, image) for row in rows for side in row.sides for image in side.images)
    unknown = [image for image in images if image not in known]
    found = dict(zip(unknown, threads.map(size_of, unknown), strict=True))
    return {image: found[image] if image in found else known[image] for image in images}


def _size(measure: Measure, max_pixels: int, place: _Place) -> Size | ImageProblem:
    roots, image = place
    try:
        return measure(image, roots, max_pixels)
    except ImageProblem as problem:
        return problem

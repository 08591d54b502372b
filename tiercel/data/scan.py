"""Check all rows before a run: the header or the pixels of every image, and the length of every prompt."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from tiercel.config.schema import Data
from tiercel.data.media.images import ImageProblem, decode, open_header
from tiercel.data.parallel_map import blocks_of, spread
from tiercel.data.row_table import RowTable
from tiercel.data.rows import reject
from tiercel.data.stores import RowView, view_of
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.types import ImageRoots, ImageSource, RejectedRow, Row, Size

PERCENTILES = (0, 50, 90, 99, 100)

Measure: TypeAlias = Callable[[ImageSource, ImageRoots, int], Size]  # reads an image's size; raises ImageProblem
_Place: TypeAlias = "tuple[ImageRoots, ImageSource]"
_BLOCK_ROWS = 256
_MOST_KNOWN = 1 << 16  # sizes of pictures that a process keeps for the next rows that name them
_THREADS = 8  # reading waits for the disk or the network, and Pillow decodes without the interpreter's lock


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPrompt:
    """Holds what is known of a prompt before it is encoded."""

    tokens: int
    notes: tuple[str, ...] = ()  # what is odd about the row


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    """Counts what a scan finds in rows."""

    rejected: list[RejectedRow] = field(default_factory=list)  # while the rows were read, and by the scan
    rows_by_image_count: Counter[int] = field(default_factory=Counter)  # accepted rows
    rows_by_length: Counter[int] = field(default_factory=Counter)  # accepted rows, by the tokens of their prompts
    notes: Counter[str] = field(default_factory=Counter)  # what is odd about rows, and about how many sides of them
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)  # columns with the types of their values

    @property
    def accepted(self) -> int:
        """Return the number of accepted rows."""
        return self.rows_by_length.total()

    @property
    def image_count(self) -> int:
        """Return the number of images of accepted rows; a file that several rows name is counted once for each."""
        return sum(images * rows for images, rows in self.rows_by_image_count.items())

    @property
    def prompt_token_percentiles(self) -> dict[int, int]:
        """Return PERCENTILES of the tokens of accepted rows; empty if there are none."""
        return percentiles(self.rows_by_length)

    def add(self, later: "ScanReport") -> None:
        """Add what was found in later rows."""
        self.rejected.extend(later.rejected)
        self.rows_by_image_count.update(later.rows_by_image_count)
        self.rows_by_length.update(later.rows_by_length)
        self.notes.update(later.notes)
        self.left_out.update(later.left_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Checks the images of rows, which `measure` opens, and the length of their prompts, which `plan_prompt(row,
    sizes)` returns. A row is rejected if one of them raises DataError, or if its prompt is longer than
    data.max_prompt_tokens."""

    plan_prompt: Callable[[Row, list[Size]], PlannedPrompt]
    config: Data
    measure: Measure = open_header
    is_shared: bool = True  # among processes; not if `plan_prompt` asks a process of its own

    def __call__(self, table: RowTable, progress: Callable[[int, int], None] = lambda done, total: None) -> ScanReport:
        """Check all rows of a table. `progress` is called with (rows done, rows in all)."""
        rows, known = view_of(table.rows), dict[_Place, Size | ImageProblem]()
        report = ScanReport(rejected=list(table.rejected))
        blocks = blocks_of(len(rows), _BLOCK_ROWS)
        work = partial(self._block, rows, known)
        for block, one in zip(blocks, spread(work, blocks) if self.is_shared else map(work, blocks), strict=True):
            report.add(one)
            progress(block.stop, len(rows))
        report.rejected.sort(key=lambda row: (row.file, row.line))
        return report

    def _block(self, rows: RowView, known: dict[_Place, Size | ImageProblem], block: range) -> ScanReport:
        looked = [rows.look(number) for number in block]
        found = ScanReport(rejected=[row for row in looked if isinstance(row, RejectedRow)])
        usable = [row for row in looked if isinstance(row, Row)]
        found.left_out.update(left for row in usable for left in row.left_out)
        sizes = _sizes(usable, known, partial(_size, self.measure, self.config.max_image_pixels))
        if len(known) > _MOST_KNOWN:
            known.clear()
        known.update({place: size for place, size in sizes.items() if place[1].data is None})
        for row in usable:
            try:
                plans = [self._planned(side, sizes) for side in row.sides]
            except DataError as error:
                found.rejected.append(reject(row, error))
                continue
            found.rows_by_image_count[len(row.images)] += 1
            found.rows_by_length[max(plan.tokens for plan in plans)] += 1
            found.notes.update(note for plan in plans for note in plan.notes)
        return found

    def _planned(self, row: Row, sizes: Mapping[_Place, Size | ImageProblem]) -> PlannedPrompt:
        row_sizes = []
        for image in row.images:
            size = sizes[row.image_roots, image]
            if isinstance(size, ImageProblem):
                raise size.with_traceback(None)  # the same problem may be raised for many rows
            row_sizes.append(size)
        planned, most = self.plan_prompt(row, row_sizes), self.config.max_prompt_tokens
        if planned.tokens > most:
            raise DataError(told("long prompt", planned.tokens, most), field="messages")
        return planned


def decoded_size(image: ImageSource, roots: ImageRoots, max_pixels: int) -> Size:
    """Decode an image and return its size. Raises ImageProblem."""
    return decode(image, roots, max_pixels).size


def undecodable(rows: Sequence[Row], config: Data) -> list[RejectedRow]:
    """Return a RejectedRow for each row with an image that cannot be decoded."""
    sizes = _sizes(rows, {}, partial(_size, decoded_size, config.max_image_pixels))
    found: list[RejectedRow] = []
    for row in rows:
        problems = (sizes[row.image_roots, image] for side in row.sides for image in side.images)
        problem = next((problem for problem in problems if isinstance(problem, ImageProblem)), None)
        if problem is not None:
            found.append(reject(row, problem))
    return found


def percentiles(counts: Mapping[int, int]) -> dict[int, int]:
    """Compute PERCENTILES by nearest rank. `counts` has how often each value occurs. Empty if there are no values."""
    values = sorted(counts)
    ends = list(accumulate(counts[value] for value in values))
    ranks = [max(1, -(-percent * ends[-1] // 100)) for percent in PERCENTILES] if ends else []  # rounded up
    return {percent: values[bisect_left(ends, rank)] for percent, rank in zip(PERCENTILES, ranks, strict=False)}


def _sizes(
    rows: Sequence[Row], known: Mapping[_Place, Size | ImageProblem], size_of: Callable[[_Place], Size | ImageProblem]
) -> dict[_Place, Size | ImageProblem]:
    """Return the size of each distinct image of the rows, or its problem."""
    images = dict.fromkeys((row.image_roots, image) for row in rows for side in row.sides for image in side.images)
    unknown = [image for image in images if image not in known]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = dict(zip(unknown, threads.map(size_of, unknown), strict=True))
    return {image: found[image] if image in found else known[image] for image in images}


def _size(measure: Measure, max_pixels: int, place: _Place) -> Size | ImageProblem:
    roots, image = place
    try:
        return measure(image, roots, max_pixels)
    except ImageProblem as problem:
        return problem

"""Row files made by Hypothesis: any JSON in any field of every format, and lines that are not JSON at all.

Every row must be read or rejected, with its field and a reason that can be printed and written. Rows that are read must
be fit to be written again.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as some
from PIL import Image

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tiercel.config.data import FormatName
from tiercel.config.schema import Data
from tiercel.data.reading import read_rows
from tiercel.data.rejected_rows import first_reasons, write_bad_rows
from tiercel.data.turns import Purpose
from tiercel.runs.files import json_line
from tiercel.types import RejectedRow, Row

ROW_COUNTS = {"short": 250, "full": 10_000}
ROWS_A_FILE = 5
QUESTION = {"role": "user", "content": "<image>Where is the 7?"}
REPLY = {"role": "assistant", "content": "There: <bbox>"}
GOOD: dict[FormatName, tuple[dict[str, Any], ...]] = {
    "tiercel": (
        {"messages": [QUESTION, {"role": "assistant", "content": "There."}], "images": ["a.png"], "answer": [1, 2]},
        {"messages": [QUESTION, REPLY], "images": ["a.png"], "boxes": [[1, 2, 3, 4]]},
    ),
    "swift": (
        {"query": "Where?", "response": "There.", "history": [["a", "b"]], "images": ["a.png"], "system": "Be brief."},
        {"messages": [QUESTION, REPLY], "images": ["a.png"], "objects": {"bbox": [[1, 2, 3, 4]]}, "label": "<answer>7"},
    ),
    "vlm_r1": (
        {"conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": [1, 2]}], "image": "a.png"},
        {"problem": "Where?", "solution": "<answer>[1, 2]</answer>", "image": ["a.png"]},
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "There."}],
            "system": "Be brief.",
            "images": ["a.png"],
        },
    ),
    "alpaca": ({"instruction": "Where?", "input": "The 7.", "output": "There.", "history": [["a", "b"]]},),
    "openai": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Where?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                },
                {"role": "assistant", "content": "There.", "weight": 1},
            ]
        },
    ),
    "refcoco": ({"image": "a.png", "bbox": [1, 2, 3, 4], "expression": "the 7"},),
}
ASKED = {"prompt": "Where?", "images": ["a.png"]}
SIDES = {"chosen": "There.", "rejected": "Here."}
PAIRED: dict[FormatName, tuple[dict[str, Any], ...]] = {
    "tiercel": ({"messages": [QUESTION, {"role": "assistant", "content": "a"}], "rejected": "b", "images": ["a.png"]},),
    "swift": ({"query": "Where?", "response": "There.", "rejected_response": "Here.", "images": ["a.png"]},),
    "trl": (ASKED | SIDES,),
    "rlhf_v": (
        {"question": "Where?", "image": "a.png", **SIDES},
        {"text": json.dumps({"question": "Where?", **SIDES})},
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "Where?"}],
            **{side: {"from": "gpt", "value": answer} for side, answer in SIDES.items()},
        },
    ),
    "alpaca": ({"instruction": "Where?", **SIDES},),
}
LABELLED: dict[FormatName, tuple[dict[str, Any], ...]] = {
    "tiercel": ({"messages": [QUESTION, {"role": "assistant", "content": "a"}], "label": True, "images": ["a.png"]},),
    "trl": ({**ASKED, "completion": "There.", "label": False},),
    "alpaca": ({"instruction": "Where?", "output": "There.", "kto_tag": True},),
}
ROWS: dict[Purpose, dict[FormatName, tuple[dict[str, Any], ...]]] = {
    "grpo": GOOD,
    "sft": GOOD,
    "pairs": PAIRED,
    "labels": LABELLED,
}
LONG = 1 << 20

texts = some.one_of(
    some.text(max_size=20),
    some.sampled_from(
        (
            "<image>",
            "<image><image>",
            "<video>",
            "<bbox>",
            "<ref-object>",
            "\0",
            "\ud800",
            "a\udfff.png",
            "\udc80.png",
            "\u202e\u200b",
            "\x1b[2J",
            "../a.png",
            "http://a",
            "<answer>[1, 2",
            "<answer>[" * 50,
            "[1e400]",
            "1" * 5000,
            "x" * 3000,
            "user",
            "assistant",
            "system",
        )
    ),
)
numbers = some.one_of(
    some.integers(),
    some.floats(allow_nan=False, allow_infinity=False),
    some.sampled_from((10**400, -(10**4000), 2**63, 2**64, -1, 0, 1, 5e-324, 1.7976931348623157e308, True, False)),
)
values = some.recursive(
    some.one_of(some.none(), some.booleans(), numbers, texts),
    lambda inner: some.one_of(some.lists(inner, max_size=4), some.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
roles = some.one_of(some.sampled_from(("system", "user", "assistant", "human", "gpt", "tool")), values)
boxes = some.one_of(some.lists(some.lists(numbers, max_size=5), max_size=3), values)
images = some.one_of(texts, some.lists(texts, max_size=3), some.builds(lambda path: {"path": path}, texts), values)


def turns(role_key: str, content_key: str) -> some.SearchStrategy:
    """Return a strategy for conversations, some of them good."""
    urls = some.one_of(
        texts, some.sampled_from(("data:image/png;base64,AA=A", "data:image/png;base64,", "data:,")), values
    )
    part = some.one_of(
        some.builds(lambda text: {"type": "text", "text": text}, texts),
        some.sampled_from(({"type": "image"}, {"type": "video"})),
        some.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, urls),
        values,
    )
    content = some.one_of(texts, some.lists(part, max_size=3), values)
    turn = some.builds(lambda role, text: {role_key: role, content_key: text}, roles, content)
    masked = some.builds(
        lambda turn, key, value: {**turn, key: value}, turn, some.sampled_from(("loss", "weight")), values
    )
    turn = some.one_of(turn, turn, masked)
    return some.one_of(some.lists(some.one_of(turn, values), max_size=4), values)


videos = some.fixed_dictionaries(
    {}, optional={"path": texts, "frames": some.one_of(some.lists(texts, max_size=3), values), "fps": numbers}
)
objects = some.one_of(
    some.fixed_dictionaries(
        {},
        optional={
            "ref": some.one_of(some.lists(texts, max_size=3), values),
            "bbox": boxes,
            "bbox_type": some.one_of(some.sampled_from(("real", "norm1")), values),
            "image_id": some.one_of(some.lists(some.integers(-1, 3), max_size=3), values),
        },
    ),
    values,
)
FIELDS: dict[str, some.SearchStrategy] = {
    "id": values,
    "messages": turns("role", "content"),
    "conversations": turns("from", "value"),
    "images": images,
    "image": images,
    "answer": values,
    "boxes": boxes,
    "box_images": some.one_of(some.lists(some.integers(-1, 3), max_size=3), values),
    "query": some.one_of(texts, values),
    "response": some.one_of(texts, values),
    "history": some.one_of(some.lists(some.lists(texts, max_size=3), max_size=3), values),
    "system": values,
    "objects": objects,
    "solution": values,
    "label": values,
    "problem": some.one_of(texts, values),
    "videos": some.one_of(some.lists(some.one_of(texts, videos, some.lists(texts, max_size=3)), max_size=2), values),
    "instruction": some.one_of(texts, values),
    "input": values,
    "output": some.one_of(texts, values),
    "bbox": some.one_of(some.lists(numbers, min_size=4, max_size=4), values),
    "expression": some.one_of(texts, values),
    "min_pixels": some.one_of(numbers, values),
    "max_pixels": some.one_of(numbers, values),
    "tools": values,
    "prompt": some.one_of(texts, turns("role", "content"), values),
    "completion": some.one_of(texts, turns("role", "content"), values),
    "chosen": some.one_of(texts, turns("role", "content"), values),
    "rejected": some.one_of(texts, turns("role", "content"), values),
    "rejected_response": some.one_of(texts, values),
    "rejected_messages": turns("role", "content"),
    "rejected_images": images,
    "kto_tag": values,
    "question": some.one_of(texts, values),
    "text": some.one_of(texts, values.map(json.dumps), values),
}
records = some.one_of(
    some.fixed_dictionaries({}, optional=FIELDS),
    some.dictionaries(texts, values, max_size=4),
)


def nested(opening: str, closing: str) -> some.SearchStrategy:
    """Return a strategy for values of a field, nested around the depths at which parsers and printers give up."""
    depths = some.one_of(some.integers(1, 1100), some.just(100_000))
    keys = some.sampled_from(("messages", "images", "id", "answer", "objects", "boxes"))
    return some.builds(lambda key, depth: f'{{"{key}": {opening * depth}1{closing * depth}}}'.encode(), keys, depths)


odd_lines = some.one_of(
    some.binary(max_size=60).map(lambda data: data.replace(b"\n", b" ") if data.strip() else b"-"),
    values.map(lambda value: json.dumps(value).encode()),
    nested("[", "]"),
    nested('{"a": ', "}"),
    some.sampled_from(
        (
            b'{"messages": NaN}',
            b'{"answer": Infinity, "messages": []}',
            b'{"answer": -Infinity}',
            b'{"answer": 1e999}',
            b'{"answer": ' + b"9" * 10_000 + b"}",
            b'{"answer": 0.' + b"9" * 10_000 + b"}",
            b'{"messages": 1, "messages": [], "messages": "a"}',
            b'{"id": "good", "messages": [{"role": "user", "content": "a"}]}',
            b'{"a": "\xff\xfe"}',
            b'{"a": "\xed\xa0\x80"}',
            b'{"a": "\\ud800"}',
            b'{"\\udfff": 1, "messages": [{"role": "user", "content": "a"}]}',
            b'{"messages": [{"role": "user", "content": "a"}], "a": {"\\ud800": 1}}',
            b'{"a": "\\u0000"}',
            b'{"a": "\0"}',
            b"\xef\xbb\xbf{}",
            b"\xef\xbb\xbf" * 3,
            b"{'a': 1}",
            b'{"a": 1,}',
            b'{"a": 1} {"a": 2}',
            b'{"a": ',
            b"null",
            b"[]",
            b'""',
            b"0",
            b"--1",
            b'{"a": "' + b"x" * LONG + b'"}',
            b'{"messages": [{"role": "user", "content": "' + b"<image>" * 10_000 + b'"}]}',
            b'{"images": ["' + b"x/" * (LONG // 8) + b'"], "messages": [{"role": "user", "content": "a"}]}',
            b'{"images": [' + b'"a",' * 10_000 + b'"a"], "messages": [{"role": "user", "content": "a"}]}',
        )
    ),
)


def files_of(purpose: Purpose, format: FormatName) -> some.SearchStrategy:
    """Return a strategy for files that claim a format: good rows with a few fields replaced, any other rows, and lines
    that are not rows."""
    change = some.one_of([some.tuples(some.just(key), field) for key, field in FIELDS.items()])
    good = some.sampled_from(ROWS[purpose][format])
    spoilt = some.builds(lambda good, changes: good | dict(changes), good, some.lists(change, max_size=2))
    written = some.one_of(spoilt, spoilt, records).map(lambda record: json.dumps(record).encode())
    return some.tuples(
        some.just(format),
        some.just(purpose),
        some.sampled_from((b"\n", b"\r\n", b"\n\n", b" \n")),
        some.sampled_from((b"", b"\xef\xbb\xbf")),
        some.lists(some.one_of(written, written, odd_lines), min_size=ROWS_A_FILE, max_size=ROWS_A_FILE),
    )


files = some.one_of([files_of(purpose, format) for purpose in ROWS for format in ROWS[purpose]])


def fuzzed_rows(size: Size, seed: int, work_dir: Path) -> Figure:
    """Try as many files as contain the wanted number of rows. The same seed gives the same files."""
    started = time.perf_counter()
    Image.new("RGB", (8, 8)).save(work_dir / "a.png")
    outcomes: list[Outcome] = []
    counts = {"read": 0, "rejected": 0}

    def judge(file: tuple[Any, ...]) -> None:
        problems, read, rejected = _judged(work_dir / f"{len(outcomes)}.jsonl", *file)
        counts["read"] += read
        counts["rejected"] += rejected
        name = f"file {len(outcomes) // ROWS_A_FILE}, {file[0]} for {file[1]}"
        outcomes.extend((name, problem) for problem in problems)

    _run(judge, ROW_COUNTS[size] // ROWS_A_FILE, seed)
    return figure_of("fuzzed rows", outcomes, seed=seed, seconds=time.perf_counter() - started, figures=counts)


def _run(judge: Callable[[tuple[Any, ...]], None], examples: int, seed: int) -> None:
    """Use Hypothesis only as a generator: it stores nothing, and `judge` counts what fails."""
    plain = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seeded(seed)(plain(given(files)(judge)))()


def _judged(
    path: Path, format: FormatName, purpose: Purpose, ending: bytes, mark: bytes, content: list[bytes]
) -> tuple[list[str | None], int, int]:
    """Return what is wrong with how each row ended, in no particular order, and how many rows were read and rejected. A
    good row comes first, because a file without any is refused as a whole."""
    good = json.dumps(ROWS[purpose][format][0] | {"id": "good"}).encode()
    path.write_bytes(mark + ending.join([good, *content]) + ending)
    config = Data(train=str(path), format=format, prompt="{prompt}" if format == "refcoco" else None)
    try:
        table = read_rows(path, config, purpose)
        write_bad_rows(table.rejected, path.with_suffix(".bad"))
        first_reasons(table.rejected).encode()
    except Exception as error:  # the fault looks for any error at all
        return [f"{type(error).__name__}: {error}"] * ROWS_A_FILE, 0, 0
    finally:
        path.unlink()
        path.with_suffix(".bad").unlink(missing_ok=True)
    expected = 1 + sum(bool(line.strip()) for line in content)
    if table.total != expected or len(table.rows) + len(table.rejected) != expected:
        problem = f"{len(table.rows)} read, {len(table.rejected)} rejected of {expected}"
        return [problem] * ROWS_A_FILE, 0, 0
    problems = [*map(_row_problem, table.rows[1:]), *map(_rejection_problem, table.rejected)]
    return [*problems, *[None] * (ROWS_A_FILE - len(problems))], len(table.rows) - 1, len(table.rejected)


def _row_problem(row: Row) -> str | None:
    """Return what is wrong with a row that was read, which later is written to rollouts/ and sent to rewards."""
    try:
        json_line(
            {
                "id": row.id,
                "answer": row.answer,
                "columns": row.columns,
                "texts": [message.content for message in row.messages],
                "paths": [image.path for image in row.images],
            }
        ).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return f"line {row.line} was read, but {type(error).__name__}: {str(error)[:200]}"
    return None


def _rejection_problem(rejected: RejectedRow) -> str | None:
    if not rejected.field or not rejected.reason:
        return f"line {rejected.line} was rejected without field or reason"
    longest_path = max((len(word) for word in rejected.reason.split() if "/" in word), default=0)  # never cut
    if len(rejected.reason) > 2000 + longest_path:
        return f"line {rejected.line}: a reason of {len(rejected.reason)} characters"
    try:
        f"{rejected.id} {rejected.field} {rejected.reason}".encode()
    except UnicodeEncodeError:
        return f"line {rejected.line}: a reason that cannot be written"
    return None

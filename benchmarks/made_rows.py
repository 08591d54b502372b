"""Files of rows for the benchmark of large files: JSON Lines, tar shards, and Parquet with embedded pictures.

Every row has an id of its own. The pictures repeat, because what is measured are rows.
"""

import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

WORDS = [f"word-{number}" for number in range(23)]
ROWS_A_SHARD = 100
ROWS_A_PARQUET_FILE = 1000
BYTES_OF_A_PICTURE = 197_000  # of Parquet
_ROWS_A_GROUP = 100  # as datasets writes embedded pictures
_FILES = 256  # of pictures that JSON Lines name
_DIFFERENT = 50  # pictures of shards and Parquet files


def write_lines(folder: Path, count: int) -> None:
    """Write rows of about 460 bytes, each with a picture's name, a question and an answer."""
    draw = random.Random(0)
    (folder / "pictures").mkdir()
    for number in range(_FILES):
        (folder / "pictures" / f"{number:08d}.jpg").write_bytes(_picture(draw, 64, "JPEG"))
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(count):
            images = [f"pictures/{draw.randrange(_FILES):08d}.jpg"]
            row = {"id": f"rec-{number}", "images": images, "answer": [draw.randrange(500) for _ in range(4)]}
            row |= {"task": draw.choice(["rec", "ocr"]), "messages": _messages(draw)}
            stream.write(json.dumps(row) + "\n")


def write_shards(folder: Path, count: int) -> None:
    """Write tar shards of ROWS_A_SHARD rows, each of a JSON and a picture of 10 kB."""
    draw = random.Random(0)
    pictures = [_picture(draw, 96, "JPEG") for _ in range(_DIFFERENT)]
    for shard, numbers in enumerate(_parts(count, ROWS_A_SHARD)):
        with tarfile.open(folder / f"rows-{shard:06d}.tar", "w") as tar:
            for number in numbers:
                text = json.dumps({"messages": _messages(draw)}).encode()
                for ending, data in (("json", text), ("jpg", draw.choice(pictures))):
                    member = tarfile.TarInfo(f"rec-{number:08d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path, count: int) -> None:
    """Write Parquet files of ROWS_A_PARQUET_FILE rows, each with a picture of BYTES_OF_A_PICTURE."""
    import pyarrow
    from pyarrow import parquet

    draw = random.Random(0)
    pictures = [_picture(draw, 256, "PNG") for _ in range(_DIFFERENT)]
    for part, numbers in enumerate(_parts(count, ROWS_A_PARQUET_FILE)):
        writer = None
        for some in _parts(len(numbers), _ROWS_A_GROUP):
            rows = [
                {
                    "id": f"rec-{numbers[place]}",
                    "images": [{"bytes": draw.choice(pictures), "path": None}],
                    "messages": _messages(draw),
                }
                for place in some
            ]
            table = pyarrow.Table.from_pylist(rows)
            file = folder / f"rows-{part:06d}.parquet"
            writer = writer or parquet.ParquetWriter(file, table.schema, use_dictionary=False)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _messages(draw: random.Random) -> list[dict[str, str]]:
    question, answer = (" ".join(draw.choices(WORDS, k=words)) for words in (25, 12))
    turns = [("user", f"<image>{question}"), ("assistant", answer)]
    return [{"role": role, "content": text} for role, text in turns]


def _picture(draw: random.Random, side: int, kind: str) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.frombytes("RGB", (side, side), draw.randbytes(3 * side * side)).save(stream, kind)
    return stream.getvalue()


def _parts(count: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, count)) for first in range(0, count, size))

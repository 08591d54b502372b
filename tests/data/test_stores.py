"""Rows as a view of stores: the same rows, choices and clusters as from plain lists."""

import random
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest

from tiercel.data.order import chosen, clusters_of
from tiercel.data.stores import MemoryStore, RowView, UnusableRow, joined, repeated_ids, view_of
from tiercel.types import ImageSource, Message, RejectedRow, Row


def row(id, file="a.jsonl", line=1, images=()):
    text = "<image>" * len(images) + "?"
    sources = tuple(ImageSource(path=each) for each in images)
    return Row(id=id, messages=(Message(role="user", content=text),), images=sources, columns={}, file=file, line=line)


def view(file, ids):
    return RowView([MemoryStore(file, [row(id, file, number) for number, id in enumerate(ids, start=1)])])


def chosen_one_by_one(rows, count, use):
    """The choice as it was made before rows were indexed."""
    first_ids = {}
    for each in rows:
        first_ids.setdefault((each.file, each.line), each.id)

    def rank(position):
        each = rows[position]
        digest = sha256(f"{use}\n{first_ids[each.file, each.line]}".encode()).digest()
        return digest, each.file, each.line, position

    return sorted(sorted(range(len(rows)), key=rank)[:count])


def clusters_one_by_one(keys, most=None):
    numbers, seen, of_row = {}, Counter(), []
    for key in keys:
        part = 0 if most is None else seen[key] // most
        of_row.append(numbers.setdefault((key, part), len(numbers)))
        seen[key] += 1
    return of_row


@pytest.mark.parametrize("seed", range(20))
def test_choices_and_clusters_equal_those_of_plain_lists(seed):
    draw = random.Random(seed)
    files = ["b.jsonl", "a.jsonl"][: draw.randint(1, 2)]
    stores = []
    for file in files:
        lines = sorted(draw.choices(range(1, 30), k=draw.randint(1, 40)))  # several rows of a line
        stores.append(MemoryStore(file, [row(f"id-{draw.randrange(25)}", file, line) for line in lines]))
    rows = RowView(stores)
    if draw.random() < 0.5:
        rows = rows.subset(np.array(sorted(draw.sample(range(len(rows)), draw.randint(1, len(rows))))))
    count = draw.randint(0, len(rows))
    found = chosen(rows.files, rows.column("line"), rows.ids(), count, "held out")
    assert found.tolist() == chosen_one_by_one(list(rows), count, "held out")
    keys, most = [draw.randrange(6) for _ in range(draw.randint(0, 30))], draw.choice([None, 1, 2, 3])
    assert clusters_of(keys, most).of_row.tolist() == clusters_one_by_one(keys, most)
    names = [each.id for each in rows]
    firsts = [names.index(name) for name in names]
    assert repeated_ids(rows) == {number: first for number, first in enumerate(firsts) if first != number}
    assert list(rows.ids()) == names


def test_a_view_is_a_sequence_of_its_rows():
    both = joined([view("a.jsonl", "abc"), view("b.jsonl", "de")[1:]])
    assert [(each.id, each.file) for each in both] == [(id, "a.jsonl") for id in "abc"] + [("e", "b.jsonl")]
    assert (len(both), both[-1].id, both[1:3][1].id, list(both[::-1].ids())) == (4, "e", "c", ["e", "c", "b", "a"])
    assert both == list(both) and both != list(both)[:3] and both.files.tolist() == [0, 0, 0, 1]
    with pytest.raises(IndexError):
        both[4]


def test_rows_that_begin_alike_have_one_hash_and_rows_without_pictures_their_own():
    rows = [row("a", images=["x"]), row("b", images=["x"]), row("c", images=["y"]), row("d"), row("e")]
    found = view_of(rows).column("beginning").tolist()
    assert found[0] == found[1] and len(set(found)) == 4
    assert view_of(rows).column("images").tolist() == [1, 1, 1, 0, 0]


def test_a_row_that_cannot_be_used_any_more_is_named():
    class Lost(MemoryStore):
        def look(self, number):
            return RejectedRow(id="a", file="a.jsonl", line=3, field="images", reason="is missing")

    rows = RowView([Lost("a.jsonl", [row("a")])])
    assert isinstance(rows.look(0), RejectedRow)
    with pytest.raises(UnusableRow, match=r"a\.jsonl:3 \(a\) images: is missing") as caught:
        rows[0]
    assert caught.value.field == "images"

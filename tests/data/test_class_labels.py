"""Class labels of Hugging Face's datasets are read as their names."""

import json

import pytest

from tiercel.config.data import Data
from tiercel.data.class_labels import class_labels, with_names
from tiercel.data.reading import read_rows

LABEL = {"names": ["cat", "dog"], "_type": "ClassLabel"}
NUMBER = {"dtype": "int64", "_type": "Value"}
BOXES = {"bbox": [[NUMBER]], "category": LABEL}


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (LABEL, 0, "cat"),
        (LABEL, 1, "dog"),
        (LABEL, -1, None),  # a test split
        (LABEL, None, None),
        (LABEL, 2, 2),  # there is no such name
        ([LABEL], [1, 0], ["dog", "cat"]),
        ({"feature": LABEL, "_type": "List"}, [1, 1], ["dog", "dog"]),
        (
            {"feature": BOXES, "_type": "Sequence"},
            {"bbox": [[1]], "category": [1]},
            {"bbox": [[1]], "category": ["dog"]},
        ),
        ([BOXES], [{"bbox": [1], "category": 0}], [{"bbox": [1], "category": "cat"}]),
        (
            {"one": {"kind": LABEL}},
            {"one": {"kind": 1}, "more": {"kind": 1}},
            {"one": {"kind": "dog"}, "more": {"kind": 1}},
        ),
    ],
)
def test_names_take_the_place_of_labels_at_every_depth(kind, value, read):
    described = {"info": {"features": {"it": kind, "count": NUMBER}}}
    labels = class_labels({b"huggingface": json.dumps(described).encode()})
    assert [*labels] == ["it"]
    assert with_names({"it": value, "count": 1}, labels) == {"it": read, "count": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"info": null}', '{"info": {"features": []}}'])
def test_a_schema_without_types_has_no_labels(text):
    assert class_labels({b"huggingface": text.encode()}) == class_labels(None) == {}


def animals(datasets):
    features = datasets.Features(
        {"question": datasets.Value("string"), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"question": ["What is it?"] * 3, "kind": [1, 0, 1]}
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.mark.parametrize("form", ["parquet", "folder", "hub"])
@pytest.mark.parametrize("is_large", [False, True])
def test_the_answer_is_the_name_and_this_is_told(tmp_path, monkeypatch, form, is_large):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0 if is_large else 1 << 25)
    place = tmp_path / "rows"
    if form == "folder":
        animals(datasets).save_to_disk(str(place))
    else:
        place.mkdir()
        animals(datasets).to_parquet(str(place / "train.parquet"))
    given = {"parquet": str(place / "train.parquet"), "folder": str(place), "hub": f"hf:{place}"}[form]
    config = Data(train=given, columns={"answer": "kind"}, cache=str(tmp_path / "index"))
    table = read_rows(given, config, "sft")
    assert [row.answer for row in table.rows] == ["dog", "cat", "dog"]
    assert table.rows[0].messages[-1].content == "dog"
    assert table.notes == ("column kind: class labels are read as their names, not as numbers",)

"""Class labels of Hugging Face's datasets are read as their names."""

import json

import pytest

from tiercel.config.data import Data
from tiercel.data.class_labels import class_labels, decoded, encoded_columns
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
    assert decoded({"it": value, "count": 1}, labels, has_json=True) == {"it": read, "count": 1}


JSON = {"_type": "Json"}


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (JSON, '"Where?"', "Where?"),
        (JSON, '[{"type": "image"}]', [{"type": "image"}]),
        *((JSON, text, text) for text in ("42", "1.50", "null", "true", "[1, 2.5]", "no JSON", "[]")),
        (JSON, "[1,2.5]", "[1, 2.5]"),
        (JSON, None, None),
        ({"feature": JSON, "_type": "List"}, ['{"role": "user"}', "7"], [{"role": "user"}, "7"]),
        ([{"from": NUMBER, "value": JSON}], [{"from": 1, "value": '"a\\"b"'}], [{"from": 1, "value": 'a"b'}]),
    ],
)
def test_text_of_json_is_read_as_the_value_that_it_holds(kind, value, read):
    metadata = {b"huggingface": json.dumps({"info": {"features": {"it": kind}}}).encode()}
    columns = encoded_columns(metadata)
    assert decoded({"it": value}, columns, has_json=True) == {"it": read} and class_labels(metadata) == {}
    assert decoded({"it": value}, columns, has_json=False) == {"it": value}  # datasets has read it


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


@pytest.mark.parametrize("is_large", [False, True])
def test_columns_in_which_datasets_found_several_types_are_read_as_from_the_file(tmp_path, monkeypatch, is_large):
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets refuses such files")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0 if is_large else 1 << 25)
    answers = ["seven", 7, [12, 30, 45, 60], None, 'a "b"']
    rows = [{"question": "Where?", "answer": answer, "id": f"{number}"} for number, answer in enumerate(answers)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "made"))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    found = []
    for given in (file, tmp_path / "rows.parquet"):
        config = Data(train=str(given), cache=str(tmp_path / "index"))
        table = read_rows(str(given), config, "grpo")
        found.append([(row.id, [turn.content for turn in row.messages], row.answer) for row in table.rows])
    assert [answer for *_, answer in found[0]] == answers and table.notes == ()
    assert found[1] == [(id, turns, "7" if answer == 7 else answer) for id, turns, answer in found[0]]

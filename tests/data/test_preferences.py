"""Rows of pairs and of labels, in each format."""

import json

import pytest

from tiercel.config.data import Data
from tiercel.data.formats.registry import detect_format, rows_of
from tiercel.data.reading import read_rows
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.types import ImageRoots, RejectedRow

ASKED = "Where is the seven?"
TURNS = [{"role": "user", "content": f"<image>{ASKED}"}, {"role": "assistant", "content": "left"}]
HUMAN = {"from": "human", "value": f"<image>{ASKED}"}
PAIRS = {
    "tiercel": {"messages": TURNS, "rejected": "right", "images": ["a.png"]},
    "tiercel turns": {"messages": TURNS, "rejected": [{"role": "assistant", "content": "right"}], "images": ["a.png"]},
    "tiercel whole": {
        "messages": TURNS,
        "rejected": [TURNS[0], {"role": "assistant", "content": "right"}],
        "images": ["a.png"],
    },
    "swift": {"messages": TURNS, "rejected_response": "right", "images": ["a.png"]},
    "swift messages": {
        "messages": TURNS,
        "rejected_messages": [TURNS[0], {"role": "assistant", "content": "right"}],
        "images": ["a.png"],
    },
    "swift query": {"query": f"<image>{ASKED}", "response": "left", "rejected_response": "right", "images": ["a.png"]},
    "trl": {"prompt": ASKED, "chosen": "left", "rejected": "right", "images": ["a.png"]},
    "trl turns": {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASKED}]}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "left"}]}],
        "rejected": [{"role": "assistant", "content": "right"}],
        "images": ["a.png"],
    },
    "trl whole": {
        "chosen": TURNS,
        "rejected": [TURNS[0], {"role": "assistant", "content": "right"}],
        "images": ["a.png"],
    },
    "sharegpt": {
        "conversations": [HUMAN],
        "chosen": {"from": "gpt", "value": "left"},
        "rejected": {"from": "gpt", "value": "right"},
        "images": ["a.png"],
    },
    "alpaca": {"instruction": ASKED, "input": "", "chosen": "left", "rejected": "right", "images": ["a.png"]},
    "rlhf_v": {"question": ASKED, "chosen": "left", "rejected": "right", "image": "a.png"},
    "rlhf_v text": {
        "text": json.dumps({"question": ASKED, "chosen": "left", "rejected": "right"}),
        "image": "a.png",
    },
}
LABELLED = {
    "swift": {"messages": TURNS, "label": True, "images": ["a.png"]},
    "trl": {"prompt": ASKED, "completion": "left", "label": False, "images": ["a.png"]},
    "sharegpt": {"conversations": [HUMAN, {"from": "gpt", "value": "left"}], "kto_tag": True, "images": ["a.png"]},
    "alpaca": {"instruction": ASKED, "output": "left", "kto_tag": 0, "images": ["a.png"]},
}


def read(tmp_path, purpose, *records, **data):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(str(file), Data(train=str(file), **data), purpose)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_each_format(tmp_path, name):
    record = {"id": "one", "source": "mine", **PAIRS[name]}
    assert detect_format([record], "rows.jsonl") == name.split()[0]
    table = read(tmp_path, "pairs", record)
    assert table.rejected == ()
    (row,) = table.rows
    for side, answer in ((row, "left"), (row.rejected, "right")):
        assert [(turn.role, turn.content) for turn in side.messages] == [
            ("user", f"<image>{ASKED}"),
            ("assistant", answer),
        ]
        assert side.images[0].path == "a.png" and side.id == "one" and side.columns["source"] == "mine"
        assert not side.columns.keys() & {"chosen", "rejected", "rejected_response", "rejected_messages"}
    assert row.rejected.rejected is None and row.label is None and row.sides == (row, row.rejected)


@pytest.mark.parametrize("name", LABELLED)
def test_labels_of_each_format(tmp_path, name):
    assert detect_format([LABELLED[name]], "rows.jsonl") == name
    (row,) = read(tmp_path, "labels", LABELLED[name]).rows
    assert row.label is bool(LABELLED[name].get("label", LABELLED[name].get("kto_tag")))
    assert row.messages[-1].content == "left" and "label" not in row.columns and row.rejected is None


def test_a_pair_may_have_other_pictures(tmp_path):
    record = {**PAIRS["tiercel"], "rejected": "left", "rejected_images": ["b.png"]}
    (row,) = read(tmp_path, "pairs", record).rows
    assert (row.images[0].path, row.rejected.images[0].path) == ("a.png", "b.png")


@pytest.mark.parametrize("name", ("tiercel", "swift query", "trl", "sharegpt", "alpaca"))
def test_a_pair_may_have_other_videos(tmp_path, name):
    record = json.loads(json.dumps(PAIRS[name]).replace("<image>", "<video>"))
    del record["images"]
    (row,) = read(tmp_path, "pairs", {**record, "video": "a.mp4", "rejected_videos": ["b.mp4"]}).rows
    assert [[video.path for video in side.videos] for side in row.sides] == [["a.mp4"], ["b.mp4"]]
    assert "rejected_videos" not in row.columns


def test_other_pictures_take_the_place_of_one_that_is_named_alone(tmp_path):
    (row,) = read(tmp_path, "pairs", {**PAIRS["rlhf_v"], "rejected_images": ["b.png"]}).rows
    assert (row.images[0].path, row.rejected.images[0].path) == ("a.png", "b.png")


@pytest.mark.parametrize("prompt", (ASKED, [{"role": "user", "content": ASKED}]))
def test_a_prompt_that_the_answers_repeat_is_asked_once(tmp_path, prompt):
    """As in ultrafeedback_binarized, whose chosen and rejected are whole conversations beside their prompt."""
    asked = {"role": "user", "content": ASKED}
    sides = {side: [asked, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    (row,) = read(tmp_path, "pairs", {"prompt": prompt, **sides}).rows
    assert [[turn.content for turn in side.messages] for side in row.sides] == [[ASKED, "chosen"], [ASKED, "rejected"]]
    sides["chosen"][0] = {"role": "user", "content": "Where is the eight?"}
    table = read(tmp_path, "pairs", {"prompt": prompt, **PAIRS["trl"] | {"images": None}}, {"prompt": prompt, **sides})
    assert [(each.line, each.field) for each in table.rejected] == [(2, "prompt")]
    completed = {"prompt": prompt, "completion": sides["rejected"]}
    (row,) = read(tmp_path, "sft", completed).rows
    assert [turn.content for turn in row.messages] == [ASKED, "rejected"]


@pytest.mark.parametrize("purpose", ("pairs", "labels"))
def test_an_answer_to_an_answer_is_rejected(tmp_path, purpose):
    twice = {"conversations": [HUMAN, {"from": "gpt", "value": "up"}], "images": ["a.png"]}
    sides = {side: {"from": "gpt", "value": side} for side in ("chosen", "rejected")}
    labelled = {**twice, "conversations": [*twice["conversations"], sides["chosen"]], "kto_tag": True}
    good = PAIRS["sharegpt"] if purpose == "pairs" else LABELLED["sharegpt"]
    table = read(tmp_path, purpose, good, {**twice, **sides} if purpose == "pairs" else labelled)
    assert [(each.line, each.field) for each in table.rejected] == [(2, "conversations")]


def test_a_chosen_answer_beside_the_messages_must_be_theirs(tmp_path):
    pair = PAIRS["tiercel"]
    same = ({**pair, "chosen": chosen} for chosen in ("left", TURNS, TURNS[1:]))
    table = read(tmp_path, "pairs", *same, {**pair, "chosen": "up"})
    assert len(table.rows) == 3 and [(each.line, each.field) for each in table.rejected] == [(4, "chosen")]


def test_only_the_last_answer_is_trained_on(tmp_path):
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    (row,) = read(tmp_path, "pairs", {"messages": [*earlier, *TURNS], "rejected": "right", "images": ["a.png"]}).rows
    for side in row.sides:
        assert [turn.is_trained for turn in side.messages if turn.role == "assistant"] == [False, True]
        assert len(side.messages) == 4


@pytest.mark.parametrize(
    ("purpose", "record", "field", "says"),
    (
        ("pairs", {"messages": TURNS, "images": ["a.png"]}, "rejected", "is missing"),
        (
            "pairs",
            {**PAIRS["tiercel"], "rejected_response": "x"},
            "rejected",
            "rejected and rejected_response; keep one",
        ),
        ("pairs", {**PAIRS["tiercel"], "rejected": "left"}, "rejected", "both answers are the same"),
        ("pairs", {**PAIRS["tiercel"], "rejected": 3}, "rejected", "must be the rejected answer, or a list of turns"),
        ("pairs", {**PAIRS["tiercel"], "rejected": "  "}, "messages[1]", "the assistant turn is empty"),
        ("pairs", {**PAIRS["tiercel"], "messages": TURNS[:1]}, "messages", "the last turn is not an"),
        ("pairs", {"prompt": ASKED, "chosen": "left"}, "rejected", "is missing"),
        ("labels", {"messages": TURNS, "images": ["a.png"]}, "label", "needs `label` or `kto_tag`"),
        ("labels", {"messages": TURNS, "images": ["a.png"], "label": "yes"}, "label", "true, false, 1 or 0"),
        ("labels", {"messages": TURNS, "images": ["a.png"], "label": 2}, "label", "true, false, 1 or 0"),
        ("sft", PAIRS["sharegpt"], "chosen", "use `tiercel dpo`"),
        ("sft", PAIRS["trl"], "chosen", "use `tiercel dpo`"),
    ),
)
def test_wrong_rows_name_the_field(purpose, record, field, says):
    reading = Reading(file="rows.jsonl", purpose=purpose, image_roots=ImageRoots(), image_size=lambda image: (1, 1))
    format = "tiercel" if "messages" in record else detect_format([record], "rows.jsonl")
    (rejected,) = rows_of(Record(line=1, value=record), format, reading)
    assert isinstance(rejected, RejectedRow)
    assert rejected.field == field and says in rejected.reason


def test_trls_rows_of_prompt_and_completion_are_for_sft_and_prompts_alone_for_grpo(tmp_path):
    (row,) = read(tmp_path, "sft", {"prompt": ASKED, "completion": "left", "images": ["a.png"]}).rows
    assert [turn.content for turn in row.messages] == [f"<image>{ASKED}", "left"]
    (row,) = read(tmp_path, "grpo", {"prompt": ASKED, "solution": "left", "images": ["a.png"]}).rows
    assert [turn.content for turn in row.messages] == [f"<image>{ASKED}"] and row.answer == "left"


@pytest.mark.parametrize(
    ("completion", "field"),
    [(3, "completion"), (["left"], "completion[0]"), ([{"role": "assistant"}], "completion[0].content")],
)
def test_a_completion_that_is_no_text_is_named(tmp_path, completion, field):
    good = {"prompt": ASKED, "completion": "left", "images": ["a.png"]}
    assert [row.field for row in read(tmp_path, "sft", good, {**good, "completion": completion}).rejected] == [field]


def test_a_question_beside_a_prompt_is_a_column(tmp_path):
    (row,) = read(tmp_path, "sft", {"prompt": "How much is 2+2?", "question": "2+2", "completion": "4"}).rows
    assert [(turn.role, turn.content) for turn in row.messages] == [("user", "How much is 2+2?"), ("assistant", "4")]
    assert row.columns == {"question": "2+2"}
    (row,) = read(tmp_path, "sft", {"prompt": None, "question": "2+2", "completion": "4"}, format="trl").rows
    assert [turn.content for turn in row.messages] == ["2+2", "4"] and row.columns == {}


CUP, PLATE, BOWL = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


def sides(record, format="tiercel"):
    """The boxes of the chosen and of the rejected side, or the reason why the row is refused."""
    reading = Reading(
        file="rows.jsonl", purpose="pairs", image_roots=ImageRoots(), image_size=lambda source: (100, 100)
    )
    (row,) = rows_of(Record(line=1, value={"images": ["a.png"], **record}), format, reading)
    if isinstance(row, RejectedRow):
        return row.reason
    return [[list(box) for box in side.boxes] for side in row.sides]


@pytest.mark.parametrize(
    ("question", "chosen", "rejected", "boxes", "expected"),
    [
        ("<image>Where?", "<bbox>", "<bbox>", [CUP, PLATE], [[CUP], [PLATE]]),
        ("<image><bbox>?", "<bbox>", "<bbox>", [CUP, PLATE, BOWL], [[CUP, PLATE], [CUP, BOWL]]),
        ("<image>Where?", "<bbox>", "nowhere", [CUP], [[CUP], []]),
        ("<image>Where?", "nowhere", "<bbox> and <bbox>", [CUP, PLATE], [[], [CUP, PLATE]]),
        ("<image>Where?", "<bbox>", "no: <bbox>", [CUP], [[CUP], [CUP]]),  # one box, which both answers contain
        ("<image><bbox>?", "yes", "no", [CUP], [[CUP], [CUP]]),
        ("<image>Where?", "<bbox>", "<bbox>", [CUP], "both answers are the same, so there is nothing to prefer"),
        (
            "<image>Where?",
            "<bbox>",
            "<bbox>",
            [CUP, PLATE, BOWL],
            ("the number of boxes is 3, but the number of <bbox> marks is 1"),
        ),
    ],
)
def test_boxes_of_a_pair_are_those_of_the_question_then_of_each_answer(question, chosen, rejected, boxes, expected):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": chosen}]
    assert sides({"messages": turns, "rejected": rejected, "boxes": boxes}) == expected
    swift = {"messages": turns, "rejected_response": rejected, "objects": {"ref": [], "bbox": boxes}}
    assert sides(swift, "swift") == expected
    whole = [turns[0], {"role": "assistant", "content": rejected}]
    assert sides({"messages": turns, "rejected_messages": whole, "objects": {"bbox": boxes}}, "swift") == expected


def test_references_of_a_pair_and_the_pictures_of_its_boxes():
    turns = [{"role": "user", "content": "<image><image><ref-object>?"}, {"role": "assistant", "content": "<bbox>"}]
    objects = {"ref": ["a cup", "a plate"], "bbox": [CUP, PLATE], "image_id": [0, 1]}
    reading = Reading(file="rows.jsonl", purpose="pairs", image_roots=ImageRoots(), image_size=lambda source: (9, 9))
    record = {"messages": turns, "rejected_response": "<ref-object>: <bbox>", "images": ["a.png", "b.png"]}
    (row,) = rows_of(Record(line=1, value={**record, "objects": objects}), "swift", reading)
    assert [side.box_images for side in row.sides] == [(0,), (1,)]
    assert [side.messages[-1].content for side in row.sides] == ["<bbox>", "a plate: <bbox>"]
    assert all(side.messages[0].content == "<image><image>a cup?" for side in row.sides)

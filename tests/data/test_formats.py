"""Every layout of rows in hand-made records, and what each layout must refuse."""

import base64
import datetime
import decimal
import json
import math

import pytest

from tiercel.data.formats.converters import clean_answer
from tiercel.data.formats.registry import FORMATS, default_id, detect_format, expanded, rows_of
from tiercel.data.media.images import ImageProblem
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.errors import DataError
from tiercel.types import ImageRoots, ImageSource, PixelLimits, RejectedRow, Row, VideoSource

USER = {"role": "user", "content": "Where is the 7?"}
ASSISTANT = {"role": "assistant", "content": "There."}


def size_of_100_by_50(source):
    return (100, 50)


def parse(record, format="tiercel", purpose="grpo", image_size=size_of_100_by_50, **reading_options):
    reading = Reading(
        file="data/rec.jsonl",
        purpose=purpose,
        image_roots=ImageRoots(base="data"),
        image_size=image_size,
        **reading_options,
    )
    (row,) = rows_of(Record(line=4, value=record), format, reading)
    return row


def accepted(record, format="tiercel", purpose="grpo", **options) -> Row:
    row = parse(record, format, purpose, **options)
    assert isinstance(row, Row), row
    return row


def refused(record, format="tiercel", purpose="grpo", **options) -> RejectedRow:
    row = parse(record, format, purpose, **options)
    assert isinstance(row, RejectedRow), row
    return row


def contents(row):
    return [message.content for message in row.messages]


# tiercel's own


def test_own_row_with_every_part():
    row = accepted(
        {
            "id": "rec-17",
            "images": ["a.png"],
            "answer": [12, 30, 45, 60],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "<image>What is at <bbox>?"},
                {"role": "assistant", "content": "A 7."},
            ],
            "boxes": [[1, 2, 3.5, 4]],
            "level": "easy",
        },
        purpose="sft",
    )
    assert (row.id, row.file, row.line) == ("rec-17", "data/rec.jsonl", 4)
    assert [message.role for message in row.messages] == ["system", "user", "assistant"]
    assert row.images == (ImageSource(path="a.png"),)
    assert row.answer == [12, 30, 45, 60]
    assert row.boxes == ((1.0, 2.0, 3.5, 4.0),)
    assert row.box_images == (0,)
    assert row.columns == {"level": "easy"}


def test_id_defaults_to_file_stem_and_line_and_may_be_a_number():
    assert accepted({"messages": [USER]}).id == "rec:4"
    assert accepted({"messages": [USER], "id": 0}).id == "0"
    assert accepted({"messages": [USER], "id": 7.0}).id == "7"
    assert refused({"messages": [USER], "id": True}).field == "id"
    assert refused({"messages": [USER], "id": ""}).id == "rec:4"


def test_images_without_marks_come_first_in_the_first_user_turn():
    row = accepted(
        {
            "images": ["a.png", "b.png"],
            "messages": [{"role": "system", "content": "S"}, USER, ASSISTANT, USER],
        }
    )
    assert contents(row) == ["S", "<image><image>Where is the 7?", "There.", "Where is the 7?"]


def test_marks_must_be_as_many_as_images():
    two = {"messages": [{"role": "user", "content": "<image> and <image>"}]}
    assert contents(accepted({**two, "images": ["a.png", "b.png"]})) == ["<image> and <image>"]
    assert refused({**two, "images": ["a.png"]}).reason == (
        "the number of <image> marks is 2, but the number of images is 1"
    )
    assert refused(two).reason == "the number of <image> marks is 2, but the number of images is 0"


OTHER_MARKS = (
    *("<image 1>", "<image1>", "<image_00>", "<Image>", "<IMAGE>", "<Image 1>", "<IMAGE_2>", "&lt;image&gt;"),
    *("<video 1>", "<VIDEO>", "<Video>", "&lt;video&gt;"),
)


@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_a_mark_of_another_framework_in_place_of_all_is_refused(mark):
    """As in MMMU (MMMU 70), or as HTML escapes it. In a text about XML or JSX it is no mark."""
    kind, column = ("video", {"videos": ["a.mp4"]}) if "vid" in mark.lower() else ("image", {"images": ["a.png"]})

    def row(asked):
        return {"messages": [{"role": "user", "content": asked}, ASSISTANT]}

    said = f"the user turn contains {mark}, a mark of a {kind.replace('image', 'picture')} in another framework"
    assert refused({**row(f"{mark} What is it?"), **column}, purpose="sft").reason.startswith(said)
    assert accepted({**row(f"<{kind}>What does {mark} do?"), **column}, purpose="sft")
    asked = f"What does {mark} do?"
    if any(each.isdigit() for each in mark):  # is hardly ever a text's own
        assert refused(row(asked), purpose="sft").reason.startswith(said)
    else:
        assert contents(accepted(row(asked), purpose="sft"))[0] == asked


def test_content_may_be_a_list_of_parts():
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    row = accepted({"images": ["a.png"], "messages": [{"role": "user", "content": parts}]})
    assert contents(row) == ["<image>What is it?"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "b.png", "resized_width": 56},
        {"type": "image", "url": 5},
        {"type": "video", "video": "../b.mp4"},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": "audio"},
        "text",
        None,
    ],
)
def test_other_parts_are_refused(part):
    row = refused({"messages": [{"role": "user", "content": [part]}]})
    assert row.field == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": " "}], "messages[0]"),
        ([{"role": "assistant", "content": "x"}], "messages"),
        ([USER, {"role": "system", "content": "late"}], "messages[1]"),
        ([USER, {"role": "assistant", "content": "x", "loss": "no"}], "messages[1].loss"),
        ([USER, {"role": "assistant", "content": "x", "weight": 0.5}], "messages[1].weight"),
        ([USER, {"role": "assistant", "content": "x", "loss": False, "weight": 0}], "messages[1].loss"),
        ([{**USER, "loss": True}, ASSISTANT], "messages[0].loss"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1]"),
        ([{**USER, "reasoning": "y"}, ASSISTANT], "messages[0].reasoning"),
        ([USER, {**ASSISTANT, "thinking": ["y"]}], "messages[1].thinking"),
        ([USER, {**ASSISTANT, "reasoning": "y", "thinking": "z"}], "messages[1].reasoning"),
        ([USER, {"role": "assistant", "content": "<think>y</think>x", "thinking": "y"}], "messages[1].thinking"),
    ],
)
def test_messages_that_are_refused(messages, field):
    assert refused({"messages": messages}).field == field


def test_what_sft_and_grpo_need_of_the_turns():
    assert refused({"messages": [USER]}, purpose="sft").reason == "there is no assistant turn to train on"
    assert "before any user turn" in refused({"messages": [ASSISTANT, USER]}, purpose="sft").reason
    assert accepted({"messages": [USER, ASSISTANT]}, purpose="grpo").messages[-1].role == "assistant"
    assert accepted({"messages": [USER, USER]}, purpose="grpo")
    assert refused({"messages": [ASSISTANT]}, purpose="grpo").reason == "there is no user turn to sample after"


def test_null_is_the_same_as_absent():
    row = accepted({"id": None, "images": None, "boxes": None, "answer": None, "messages": [{**USER, "name": None}]})
    assert (row.id, row.images, row.boxes, row.answer) == ("rec:4", (), (), None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("http://169.254.169.254/latest/meta-data", "URL"),
        ("https://example.org/a.png", "URL"),
        ("FILE:///etc/passwd", "URL"),
        ("file:/etc/passwd", "URL"),
        ("s3://bucket/a.png", "URL"),
        ("/etc/passwd", "absolute"),
        ("C:\\a.png", "absolute"),
        ("\\\\host\\share\\a.png", "absolute"),
        ("../a.png", "'..'"),
        ("a/../../b.png", "'..'"),
        ("a\\..\\b.png", "'..'"),
        ("", "empty"),
        ("a\0b.png", "null"),
    ],
)
@pytest.mark.parametrize("format", ["tiercel", "swift", "vlm_r1"])
def test_paths_that_leave_the_root_are_refused(path, why, format):
    turns = {"conversations": [{"from": "human", "value": "?"}]} if format == "vlm_r1" else {"messages": [USER]}
    row = refused({**turns, "images": [path]}, format)
    assert row.field == "images[0]"
    assert why in row.reason


def test_dots_within_a_name_are_no_escape():
    assert accepted({"messages": [USER], "images": ["a..b/c...png"]}).images[0].path == "a..b/c...png"


def test_embedded_images_keep_their_name():
    row = accepted({"messages": [USER], "images": [{"bytes": b"x", "path": "/home/me/a.png"}, {"path": "b.png"}]})
    assert row.images == (ImageSource(path="/home/me/a.png", data=b"x"), ImageSource(path="b.png"))


@pytest.mark.parametrize("image", [5, {}, {"bytes": "text"}, ["a.png"], {"bytes": b"x", "path": 1}])
def test_images_of_another_kind_are_refused(image):
    assert refused({"messages": [USER], "images": [image]}).field == "images[0]"


def test_image_and_images_together_are_refused():
    assert accepted({"messages": [USER], "image": "a.png"}).images == (ImageSource(path="a.png"),)
    assert refused({"messages": [USER], "image": "a.png", "images": ["a.png"]}).field == "images"


@pytest.mark.parametrize(
    "box",
    [
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 1, 4],
        [1, 5, 3, 4],
        [1, 2, "3", 4],
        [1, 2, True, 4],
        [1, 2, 10**400, 4],
        "box",
        None,
    ],
)
def test_boxes_that_are_refused(box):
    record = {"images": ["a.png"], "messages": [{"role": "user", "content": "<image><bbox>"}], "boxes": [box]}
    assert refused(record).field == "boxes[0]"


def test_boxes_must_be_as_many_as_marks_and_lie_on_an_image():
    record = {"images": ["a.png", "b.png"], "messages": [{"role": "user", "content": "<bbox>"}]}
    box = [0, 0, 1, 1]
    assert accepted({**record, "boxes": [box], "box_images": [1]}).box_images == (1,)
    assert refused({**record, "boxes": [box, box]}).reason == (
        "the number of boxes is 2, but the number of <bbox> marks is 1"
    )
    assert refused(record).reason == "the number of boxes is 0, but the number of <bbox> marks is 1"
    assert "lies on image 2" in refused({**record, "boxes": [box], "box_images": [2]}).reason
    assert "lies on image -1" in refused({**record, "boxes": [box], "box_images": [-1]}).reason
    assert refused({**record, "boxes": [box], "box_images": [0, 1]}).field == "box_images"
    assert "has 0 images" in refused({"messages": record["messages"], "boxes": [box]}).reason


def test_values_that_json_or_utf8_cannot_hold_are_refused():
    assert refused({"messages": [USER], "answer": [math.nan]}).field == "answer[0]"
    assert refused({"messages": [USER], "answer": b"x"}).field == "answer"
    assert refused({"messages": [{"role": "user", "content": "\ud800"}]}).field == "messages[0].content"
    assert refused({"messages": [USER], "id": "\udc00"}).id == "rec:4"
    assert refused({"messages": [USER], "\ud800": 1}).field == "row"
    assert refused({"messages": [USER], "": "\ud800"}).field == "row"
    assert refused({"messages": [USER], "meta": {"x": [{"\udfff": 1}]}}).field == "meta.x[0]"
    assert refused({"messages": [USER], "images": ["\ud800.png"]}).reason.startswith("'\\ud800.png'")
    nested = []
    for _ in range(500):
        nested = [nested]
    assert refused({"messages": [USER], "meta": {"x": nested}}).field.startswith("meta.x[0][0]")
    for _ in range(100_000):
        nested = [nested]
    assert refused({"messages": [USER], "images": nested}).reason == "is nested too deeply"
    assert refused({"messages": [USER], "id": nested}).reason == "is nested too deeply"


def test_a_number_that_is_not_finite_in_a_column_that_no_format_reads_leaves_the_column_out():
    """Tables of pandas have NaN where a number is missing."""
    row = accepted({"messages": [USER], "score": float("nan"), "meta": {"x": [math.inf]}, "width": 2.5})
    assert row.left_out == (("score", "float nan"), ("meta", "float inf")) and row.columns == {"width": 2.5}


def test_a_column_that_only_another_format_reads_leaves_no_row_out():
    row = accepted({"messages": [USER], "bbox": [math.nan] * 4, "objects": {"bbox": [[math.inf]]}})
    assert row.left_out == (("bbox", "float nan"), ("objects", "float inf"))
    assert refused({"messages": [USER], "objects": {"bbox": [[math.inf]]}}, format="swift").field.startswith("objects")


def test_a_number_that_is_missing_is_missing_in_every_column():
    row = accepted({"question": "?", "id": math.nan, "answer": "3", "label": math.nan, "caption": math.nan}, "qa")
    assert (row.id, row.answer, row.columns) == ("rec:4", "3", {})
    assert accepted({"messages": [USER], "answer": math.nan}).answer is None


def test_whole_numbers_that_a_table_holds_as_floats():
    row = accepted({"messages": [USER], "images": ["a.png", "b.png"], "max_pixels": 784.0, "answer_image": 1.0})
    assert (row.pixels, row.answer_image) == (PixelLimits(most=784), 1)
    assert refused({"messages": [USER], "images": ["a.png"], "max_pixels": 784.5}).field == "max_pixels"


@pytest.mark.parametrize("images", ([None], [{"bytes": None, "path": None}]))
def test_a_list_of_pictures_that_are_not_there_is_empty(images):
    assert accepted({"messages": [USER], "images": images}).images == ()


def test_pictures_and_videos_as_verl_writes_them():
    row = accepted({"messages": [USER], "images": [{"image": "a.png"}]})
    assert row.images == (ImageSource(path="a.png"),)
    video = {"type": "video", "video": "a.mp4", "fps": 2}
    assert accepted({"messages": [USER], "videos": [video]}).videos == (VideoSource(path="a.mp4", fps=2.0),)
    assert refused({"messages": [USER], "videos": [{**video, "max_frames": 8}]}).field == "videos[0]"


def test_a_file_name_that_is_not_utf_8_gives_ids_that_can_be_written():
    assert default_id("donn\udce9es.jsonl", 3).encode() == b"donn\\udce9es:3"


def test_reasons_and_fields_have_a_limit():
    turn = {"role": "user", "content": "a", "x" * 9000: 1}
    assert len(refused({"messages": [turn]}).reason) < 300
    assert len(refused({"messages": [USER], "x" * 9000: "\ud800"}).field) == 5000


# ms-swift


def test_swift_grounding_row():
    objects = {"ref": ["a dog", "a woman"], "bbox": [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]]}
    row = accepted(
        {
            "messages": [
                {"role": "user", "content": "<image>Describe it."},
                {"role": "assistant", "content": "<ref-object><bbox> and <ref-object><bbox> play"},
            ],
            "images": "x.jpg",
            "objects": objects,
        },
        "swift",
        "sft",
    )
    assert contents(row) == ["<image>Describe it.", "a dog<bbox> and a woman<bbox> play"]
    assert row.boxes == ((331.5, 761.4, 853.5, 1594.8), (676.5, 685.8, 1099.5, 1427.4))
    assert row.box_images == (0, 0)
    assert row.columns == {"objects": objects}


def test_swift_norm1_boxes_become_pixels_of_their_image():
    sizes = {"a.png": (200, 100), "b.png": (10, 20)}
    objects = {
        "ref": [],
        "bbox": [[0.25, 0.5, 0.75, 1.0], [0.1, 0, 0.5, 0.5]],
        "bbox_type": "norm1",
        "image_id": [0, 1],
    }
    row = accepted(
        {"messages": [{"role": "user", "content": "<bbox><bbox>"}], "images": ["a.png", "b.png"], "objects": objects},
        "swift",
        image_size=lambda source: sizes[source.path],
    )
    assert row.boxes == ((50.0, 50.0, 150.0, 100.0), (1.0, 0.0, 5.0, 10.0))


def test_swift_norm1_boxes_need_a_readable_image_and_shares():
    record = {"messages": [{"role": "user", "content": "<bbox>"}], "images": ["a.png"]}

    def missing(source):
        raise ImageProblem(source.path, "no such file")

    unit = {**record, "objects": {"bbox": [[0, 0, 0.5, 0.5]], "bbox_type": "norm1"}}
    assert refused(unit, "swift", image_size=missing).reason == "a.png: no such file"
    large = {**record, "objects": {"bbox": [[0, 0, 5, 5]], "bbox_type": "norm1"}}
    assert refused(large, "swift").field == "objects.bbox[0]"


@pytest.mark.parametrize(
    ("objects", "field"),
    [
        ("text", "objects"),
        ({"bbox": [[615, 226, 700]]}, "objects.bbox[0]"),
        ("[1, 2]", "objects"),
        ({"bbox": [[1, 2, 3, 4]], "bbox_type": "norm1000"}, "objects.bbox_type"),
        ({"bbox": [[1, 2, 3, 4]], "image_id": [1]}, "objects.bbox[0]"),
        ({"bbox": [[1, 2, 3, 4]], "image_id": [0.5]}, "objects.image_id"),
        ({"bbox": [[1, 2, 3, 4]], "ref": ["x"]}, "objects.ref"),
        ({"bbox": [[1, 2, 3, 4]], "ref": [5]}, "objects.ref"),
        ({"bbox": []}, "objects.bbox"),
    ],
)
def test_swift_objects_that_are_refused(objects, field):
    record = {"messages": [{"role": "user", "content": "<image><bbox>"}], "images": ["a.png"], "objects": objects}
    assert refused(record, "swift").field == field


def test_swift_references_may_not_bring_marks_of_their_own():
    record = {"messages": [{"role": "user", "content": "<ref-object>"}], "objects": {"ref": ["<image>"]}}
    assert refused(record, "swift").field == "objects.ref[0]"


def test_swift_answer_is_solution_then_answer_then_label():
    row = accepted({"messages": [USER], "solution": "<answer> 3 </answer>", "label": 1, "difficulty": 2}, "swift")
    assert row.answer == "3"
    assert row.columns == {"solution": "<answer> 3 </answer>", "label": 1, "difficulty": 2}
    assert accepted({"messages": [USER], "answer": "4", "label": 1}, "swift").answer == "4"
    assert accepted({"messages": [USER], "label": 0}, "swift").answer == 0
    assert accepted({"messages": [USER]}, "swift").answer is None


def test_swift_query_and_response():
    row = accepted(
        {
            "system": "S",
            "history": [["q1", "r1"]],
            "query": "q2",
            "response": "r2",
            "rejected_response": "no",
            "images": [{"path": "a.png", "bytes": None}],
        },
        "swift",
        "sft",
    )
    assert [(message.role, message.content) for message in row.messages] == [
        ("system", "S"),
        ("user", "<image>q1"),
        ("assistant", "r1"),
        ("user", "q2"),
        ("assistant", "r2"),
    ]
    assert row.columns == {"rejected_response": "no"}
    assert len(accepted({"query": "q"}, "swift").messages) == 1
    assert refused({"response": "r"}, "swift").field == "messages"
    assert refused({"query": "q", "history": "[]"}, "swift").field == "history"
    assert refused({"query": "q", "history": [["q1"]]}, "swift").field == "history[0]"


def test_swift_system_given_twice_and_other_media_are_refused():
    turns = [{"role": "system", "content": "S"}, USER]
    assert refused({"messages": turns, "system": "T"}, "swift").field == "system"
    assert refused({"messages": [USER], "audios": ["a.wav"]}, "swift").field == "audios"
    assert refused({"messages": [USER], "tools": "[{}]"}, "swift").field == "tools"
    assert accepted({"messages": [USER], "videos": [], "audios": None}, "swift")


# VLM-R1


def test_vlm_r1_row_takes_the_gpt_turn_as_answer():
    row = accepted(
        {
            "id": 1,
            "image": "CLEVR_1.png",
            "conversations": [
                {"from": "human", "value": "<image>How many balls?"},
                {"from": "gpt", "value": "<answer> 0 </answer>"},
            ],
            "accu_reward_method": "default",
        },
        "vlm_r1",
    )
    assert row.id == "1"
    assert [(message.role, message.content) for message in row.messages] == [
        ("user", "<image>How many balls?"),
        ("assistant", "<answer> 0 </answer>"),
    ]
    assert row.images == (ImageSource(path="CLEVR_1.png"),)
    assert row.answer == "0"
    assert row.columns == {"accu_reward_method": "default"}


def test_llavas_answer_column_wins_over_the_gpt_turn():
    record = {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "1, 2, 3: three."}],
        "answer": "3",
    }
    row = accepted(record, "vlm_r1")
    assert row.answer == "3" and row.messages[-1].content == "1, 2, 3: three."


def test_a_solution_is_learnt_with_its_thought():
    solution = "<think>because</think><answer>5</answer>"
    row = accepted({"problem": "<image>Find x", "solution": solution, "images": ["a.png"]}, "qa")
    assert row.answer == "5" and row.messages[-1].content == solution


def test_vlm_r1_solution_wins_over_the_gpt_turn():
    record = {
        "image": ["a.png", "b.png"],
        "conversations": [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "x"}],
        "solution": "<answer>[12, 30, 45, 60]</answer>",
    }
    row = accepted(record, "vlm_r1")
    assert row.answer == [12, 30, 45, 60]
    assert len(row.images) == 2


def test_vlm_r1_gpt_turn_may_be_a_number_or_a_list():
    def conversation(value):
        return {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": value}]}

    assert accepted(conversation(3.5), "vlm_r1").answer == 3.5
    assert contents(accepted(conversation([1, 2, 3, 4]), "vlm_r1", "sft"))[1] == "[1, 2, 3, 4]"
    assert refused(conversation({"a": 1}), "vlm_r1").field == "conversations[1].value"
    assert refused(conversation([]), "vlm_r1").field == "conversations[1]"


def test_vlm_r1_problem_and_solution():
    row = accepted(
        {"image": "a.jpg", "problem": "Where?", "solution": [74.0, 302.0, 181.0, 500.0], "width": 9}, "vlm_r1"
    )
    assert contents(row) == ["<image>Where?"]
    assert row.answer == [74.0, 302.0, 181.0, 500.0]
    assert row.columns["width"] == 9
    assert refused({"solution": "x"}, "vlm_r1").field == "problem"


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("<answer>[12, 30, 45, 60]</answer>", [12, 30, 45, 60]),
        ("<think>a</think><answer>\nB\n</answer>", "B"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("plain ", "plain"),
        ("</answer>x<answer>", "</answer>x<answer>"),
        ("[1, NaN]", "[1, NaN]"),
        ("[1, [2]]", "[1, [2]]"),
        ("[a]", "[a]"),
        ("[7]", "[7]"),
        ([1, 2], [1, 2]),
        (7, 7),
        (None, None),
    ],
)
def test_clean_answer(value, answer):
    assert clean_answer(value) == answer


@pytest.mark.parametrize(
    ("format", "record", "is_changed"),
    [
        ("qa", {"question": "?", "answer": "[1, 2]"}, True),
        ("verl", {"prompt": "?", "reward_model": {"ground_truth": "[1, 2]"}}, True),
        ("qa", {"question": "?", "answer": "B"}, False),
        ("swift", {"messages": [USER], "solution": "[1, 2]"}, False),  # which stays a column
    ],
)
def test_a_right_answer_that_was_cleaned_is_kept_for_rewards_of_other_frameworks(format, record, is_changed):
    row = accepted(record, format)
    assert row.named.get("answer") == ("[1, 2]" if is_changed else None)
    assert row.answer == ([1, 2] if format != "qa" or is_changed else "B")


# A system column

TURNS = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "A cup."}]
PART = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "?"}],
}


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("tiercel", {"messages": [USER, ASSISTANT]}),
        ("swift", {"messages": [USER, ASSISTANT]}),
        ("swift", {"query": "?", "response": "A cup."}),
        ("openai", {"messages": [PART, ASSISTANT]}),
        ("vlm_r1", {"conversations": TURNS}),
        ("sharegpt", {"conversations": TURNS}),
    ],
)
def test_a_system_column_is_the_first_turn(format, record):
    row = accepted({"system": "Answer in one word.", **record}, format, "sft")
    assert [turn.role for turn in row.messages] == ["system", "user", "assistant"]
    assert row.messages[0].content == "Answer in one word." and "system" not in row.columns
    for nothing in (None, ""):
        assert accepted({"system": nothing, **record}, format, "sft").messages[0].role == "user"


def test_conversations_of_which_only_some_have_a_system_column_are_sharegpts():
    records = [{"conversations": TURNS}, {"conversations": TURNS, "system": "Be brief."}]
    assert detect_format(records, "a.json") == "sharegpt"


@pytest.mark.parametrize("format", ("vlm_r1", "sharegpt"))
def test_conversations_may_have_roles_and_contents(format):
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A cup."}]
    row = accepted({"image": "a.jpg", "conversations": turns}, format, "sft")
    assert contents(row) == ["<image>?", "A cup."] and row.answer == "A cup."


# What tables write if a row has nothing


@pytest.mark.parametrize(
    "nothing",
    [
        {"image": ""},
        {"images": []},
        {"image": {"bytes": None, "path": None}},
        {"image": "", "images": [], "video": None},
    ],
)
def test_an_empty_column_of_pictures_is_none(nothing):
    assert accepted({"messages": [USER], **nothing}).images == ()
    marked = {"role": "user", "content": "<image>?"}
    assert refused({"messages": [marked], **nothing}).field  # the mark has no picture


def test_one_of_two_columns_of_pictures_may_be_empty():
    assert accepted({"messages": [USER], "image": "a.png", "images": []}).images == (ImageSource(path="a.png"),)


def test_empty_keys_of_turns_and_parts_say_nothing():
    text = {"type": "text", "text": "What?", "image": "", "url": None}
    turns = [{"role": "user", "content": [{"type": "image", "text": ""}, text], "tool_calls": [], "name": ""}]
    assert contents(accepted({"messages": turns, "images": ["a.png"]})) == ["<image>What?"]


def test_pictures_may_be_a_list_as_json_text():
    """As in tables of CSV, which have texts alone."""
    row = {"messages": [{"role": "user", "content": "<image><image>Which?"}]}
    for images in ('["a.png", "b.png"]', '[{"path": "a.png"}, {"path": "b.png"}]'):
        assert [image.path for image in accepted({**row, "images": images}).images] == ["a.png", "b.png"]
    (video,) = accepted({"messages": [{"role": "user", "content": "?"}], "video": '["0.png", "1.png"]'}).videos
    assert [frame.path for frame in video.frames] == ["0.png", "1.png"]
    assert accepted({"messages": [{"role": "user", "content": "?"}], "images": "[]"}).images == ()
    printed = refused({**row, "images": "['a.png', 'b.png']"})
    assert (printed.field, printed.reason) == ("images", "is a list as printed by Python; use the list itself, or JSON")
    one = {"messages": [{"role": "user", "content": "?"}], "image": "[album] a.png"}
    assert accepted(one).images[0].path == "[album] a.png"


def test_bytes_are_a_picture():
    row = accepted({"messages": [USER], "image": b"\x89PNG"})
    assert row.images == (ImageSource(data=b"\x89PNG"),)
    assert accepted({"messages": [USER], "images": [b"\x89PNG"]}).images == row.images


# Detection


def test_a_key_with_a_typo_is_told_with_the_key_that_it_is_near():
    with pytest.raises(DataError, match=r"If promt means prompt, set data\.columns: \{prompt: promt\}\.$"):
        detect_format([{"promt": "?", "completion": "!", "images": ["a.png"]}], "f.jsonl")


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": [USER], "images": ["a.png"], "answer": "x"}, "tiercel"),
        ({"messages": [USER]}, "tiercel"),
        ({"messages": [USER], "boxes": []}, "tiercel"),
        ({"messages": [USER], "solution": "x"}, "swift"),
        ({"messages": [USER], "objects": {}}, "swift"),
        ({"query": "q", "response": "r"}, "swift"),
        ({"conversations": [], "image": "a.png"}, "vlm_r1"),
        ({"problem": "p", "solution": [1], "image": "a.png"}, "vlm_r1"),
    ],
)
def test_detect_format(record, format):
    assert detect_format([record], "f.jsonl") == format


def test_detection_looks_at_all_first_rows():
    assert (
        detect_format([{"messages": [USER], "solution": None}, {"messages": [USER], "solution": "x"}], "f") == "swift"
    )


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"text": "x", "caption": "y"}], ["caption, text", "known format", "vlm_r1", "data.format"]),
        ([{"messages": [USER], "answer": "1", "solution": "2"}], ["swift or tiercel"]),
        ([{"query": "q"}, {"conversations": []}], ["swift or vlm_r1", "f.jsonl"]),
        ([{}], ["Keys found: none"]),
    ],
)
def test_unknown_and_ambiguous_rows_name_the_keys(records, words):
    with pytest.raises(DataError) as error:
        detect_format(records, "f.jsonl")
    for word in words:
        assert word in str(error.value)


# Turns that are not trained on


def trained(row):
    return [message.is_trained for message in row.messages if message.role == "assistant"]


@pytest.mark.parametrize("key", ("reasoning_content", "reasoning", "thinking"))
def test_a_thought_beside_the_text_of_a_turn_is_read_as_its_beginning(key):
    turns = [{**USER, key: None}, {"role": "assistant", "content": "A cup.", key: "\nIt has a handle.\n"}]
    row = accepted({"messages": turns}, purpose="sft")
    assert row.messages[1].content == "<think>\nIt has a handle.\n</think>\n\nA cup."
    turns[1][key] = ""
    assert accepted({"messages": turns}, purpose="sft").messages[1].content == "A cup."


def test_a_turn_may_be_left_out_of_the_loss():
    turns = [USER, {**ASSISTANT, "loss": False}, USER, {**ASSISTANT, "loss": True}, USER, {**ASSISTANT, "weight": 0}]
    assert trained(accepted({"messages": turns}, purpose="sft")) == [False, True, False]
    assert trained(accepted({"messages": [{**USER, "loss": False}, ASSISTANT]}, purpose="sft")) == [True]
    alone = {"messages": [USER, {**ASSISTANT, "loss": False}]}
    assert refused(alone, purpose="sft").reason == "every assistant turn is excluded from the loss"
    assert accepted(alone, purpose="grpo")


def test_only_the_last_turn_where_the_recipe_says_so():
    turns = [USER, ASSISTANT, USER, ASSISTANT]
    assert trained(accepted({"messages": turns}, purpose="sft", last_turn_only=True)) == [False, True]
    turns[-1] = {**ASSISTANT, "loss": 0}
    assert refused({"messages": turns}, purpose="sft", last_turn_only=True).field == "messages"


# The recipe's wording of the last user turn


def test_the_last_user_turn_as_the_recipe_words_it():
    record = {"messages": [USER, ASSISTANT, USER], "image": "a.png", "level": 3, "tags": ["x"], "hard": True}
    template = "{{{prompt}}} At level {level}, {tags}, {hard}."
    row = accepted(record, prompt=template)
    assert contents(row)[-1] == '{Where is the 7?} At level 3, ["x"], true.'
    assert contents(row)[0] == "<image>Where is the 7?"
    marked = {"messages": [{"role": "user", "content": "a<image>b"}], "image": "a.png"}
    assert contents(accepted(marked, prompt="Look: {prompt}")) == ["Look: a<image>b"]
    assert contents(accepted(marked, prompt="Look.")) == ["<image>Look."]


def test_a_row_without_a_column_that_the_wording_needs_is_refused():
    row = refused({"messages": [USER]}, prompt="{prompt} {level}")
    assert (row.field, row.reason) == ("level", "is missing, but data.prompt contains {level}")


# Pixels


def test_a_rows_own_pixel_limits():
    assert accepted({"messages": [USER]}).pixels is None
    row = accepted({"messages": [USER], "min_pixels": 784, "max_pixels": 3136})
    assert row.pixels == PixelLimits(least=784, most=3136) and row.columns == {}
    assert refused({"messages": [USER], "max_pixels": "3136"}).field == "max_pixels"
    assert refused({"messages": [USER], "min_pixels": 2, "max_pixels": 1}).field == "min_pixels"


# LLaMA-Factory


def test_sharegpt_rows():
    turns = [{"from": "human", "value": "<image>Where?"}, {"from": "gpt", "value": "[1, 2]"}]
    record = {"conversations": turns, "system": "Be brief.", "images": ["a.png"], "level": 1}
    row = accepted(record, format="sharegpt")
    assert contents(row) == ["Be brief.", "<image>Where?", "[1, 2]"]
    assert (row.answer, row.columns, row.images) == ([1, 2], {"level": 1}, (ImageSource(path="a.png"),))
    assert accepted({**record, "answer": "here"}, format="sharegpt").answer == "here"
    assert refused({**record, "tools": "[...]"}, format="sharegpt").field == "tools"
    call = {"conversations": [*turns, {"from": "function_call", "value": "{}"}]}
    assert refused(call, format="sharegpt").field == "conversations[2].from"


def test_alpaca_rows():
    record = {
        "instruction": "Where is it?",
        "input": "The 7.",
        "output": "<answer>left</answer>",
        "history": [["Hello", "Hi"]],
        "system": "Be brief.",
        "images": ["a.png"],
    }
    row = accepted(record, format="alpaca", purpose="sft")
    assert contents(row) == ["Be brief.", "<image>Hello", "Hi", "Where is it?\nThe 7.", "<answer>left</answer>"]
    assert row.answer == "left"
    assert refused({"instruction": "", "output": "x"}, format="alpaca").field == "instruction[0]"


# OpenAI


def picture_part(url):
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_openai_messages_with_pictures_where_they_stand():
    parts = [
        {"type": "text", "text": "Left: "},
        picture_part("data:image/png;base64,iVBORw=="),
        {"type": "text", "text": " right: "},
        picture_part("b.png"),
    ]
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {**ASSISTANT, "weight": 1},
    ]
    row = accepted({"messages": turns, "answer": "7"}, format="openai", purpose="sft")
    assert contents(row) == ["Be brief.", "Left: <image> right: <image>", "There."]
    assert row.images == (ImageSource(data=b"\x89PNG"), ImageSource(path="b.png"))
    assert row.answer == "7"


def test_formats_without_videos_refuse_them():
    turns = [{"role": "user", "content": [picture_part("b.png")]}]
    assert refused({"messages": turns, "videos": ["a.mp4"]}, format="openai").field == "videos"
    box = {"image": "a.jpg", "bbox": [0, 0, 5, 5], "caption": "cup", "video": "a.mp4"}
    assert refused(box, format="refcoco", prompt="{prompt}").field == "video"


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "file:///etc/passwd", "../a.png", "C:/a.png", "data:image/png;base64,!", None]
)
def test_openai_pictures_that_are_refused(url):
    row = refused({"messages": [{"role": "user", "content": [picture_part(url)]}]}, format="openai")
    assert row.field == "messages[0].content[0]"


# Referring expressions


def test_a_referring_expression_and_its_box():
    record = {"file_name": "a.jpg", "bbox": [10, 20, 30, 25.5], "expression": "the left cup", "ann_id": 7}
    row = accepted(record, format="refcoco", prompt="Where is {prompt}?")
    assert contents(row) == ["<image>Where is the left cup?", "<bbox>"]
    assert row.answer == [10.0, 20.0, 40.0, 45.5] and row.boxes == ((10.0, 20.0, 40.0, 45.5),)
    assert row.columns == {"file_name": "a.jpg", "ann_id": 7, "expression": "the left cup"}
    assert row.images == (ImageSource(path="a.jpg"),)


def test_a_box_of_corners_is_not_taken_for_one_of_sides():
    row = refused({"image": "a.jpg", "bbox": [60, 20, 90, 45], "caption": "cup"}, format="refcoco", prompt="{prompt}")
    assert row.field == "bbox" and "is it [x1, y1, x2, y2]?" in row.reason


def test_a_box_on_a_picture_of_another_size_names_both_sizes():
    record = {"image": "a.jpg", "bbox": [60, 20, 90, 45], "caption": "cup", "width": 570, "height": 600}
    reason = refused(record, format="refcoco", prompt="{prompt}").reason
    assert "the row says 570 x 600: scale the box" in reason and "is it" not in reason


def test_several_expressions_are_several_rows():
    record = {"id": "r1", "image": "a.jpg", "bbox": [0, 0, 5, 5], "sentences": [{"sent": "cup"}, {"sent": "left cup"}]}
    found = expanded("refcoco", record)
    assert [(each["id"], each["expression"]) for each in found] == [("r1#1", "cup"), ("r1#2", "left cup")]
    assert expanded("tiercel", record) == [record]
    empty = {"image": "a.jpg", "bbox": [0, 0, 5, 5], "sentences": []}
    assert expanded("refcoco", empty) == [empty]  # and is therefore rejected, not lost
    assert refused(empty, format="refcoco").field == "expression"


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"conversations": [], "system": "x", "images": []}, "sharegpt"),
        ({"conversations": [], "image": "a.png"}, "vlm_r1"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"messages": [{"role": "user", "content": [picture_part("a.png")]}], "answer": "x"}, "openai"),
        ({"image": "a.jpg", "bbox": [0, 0, 5, 5], "caption": "cup"}, "refcoco"),
        ({"image": "a.jpg", "bbox": [0, 0, 5, 5], "sentences": ["cup"]}, "refcoco"),
    ],
)
def test_the_further_layouts_are_told_by_their_keys(record, format):
    assert detect_format([record], "rows.jsonl") == format


# Videos


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.mp4", VideoSource(path="a.mp4")),
        ({"path": "a.mp4", "fps": 4}, VideoSource(path="a.mp4", fps=4.0)),
        (["0.png", "1.png"], VideoSource(path="0.png", frames=(ImageSource(path="0.png"), ImageSource(path="1.png")))),
        ({"frames": ["0.png"], "fps": 1}, VideoSource(path="0.png", frames=(ImageSource(path="0.png"),), fps=1.0)),
    ],
)
def test_videos_are_files_or_lists_of_frames(given, expected):
    row = accepted({"messages": [USER], "videos": [given]})
    assert row.videos == (expected,) and contents(row) == ["<video>Where is the 7?"]
    assert accepted({"messages": [USER], "video": given}, "swift").videos == (expected,)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "videos[0].frames"),
        (7, "videos[0]"),
        ({"path": "a.mp4", "frames": ["0.png"]}, "videos[0]"),
        ({"path": "a.mp4", "start": 3}, "videos[0]"),
        ({"path": "a.mp4", "fps": 0}, "videos[0].fps"),
        ("/a.mp4", "videos[0]"),
        ("https://example.org/a.mp4", "videos[0]"),
        (["../0.png"], "videos[0].frames[0]"),
    ],
)
def test_videos_that_are_refused(given, field):
    assert refused({"messages": [USER], "videos": [given]}).field == field


def test_images_and_videos_stand_in_the_order_of_their_marks():
    turn = {"role": "user", "content": "<video>a<image>b<video>c"}
    row = accepted({"messages": [turn], "images": ["i.png"], "videos": ["v.mp4", "w.mp4"]})
    assert [source.path for source in row.visuals] == ["v.mp4", "i.png", "w.mp4"]
    assert refused({"messages": [turn], "images": ["i.png"], "videos": ["v.mp4"]}).field == "messages"
    boxed = {"messages": [{"role": "user", "content": "<image><bbox>"}], "images": ["i.png"], "videos": ["v.mp4"]}
    assert "row with videos" in refused({**boxed, "boxes": [[0, 0, 1, 1]]}).reason


def test_a_column_beside_the_answer_is_not_lost():
    both = {"messages": [USER], "solution": "1", "answer": "2"}
    row = accepted(both, "swift")
    assert (row.answer, row.columns["answer"]) == ("1", "2")
    assert "answer" not in accepted({"messages": [USER], "answer": "2"}, "swift").columns
    human = {"conversations": [{"from": "human", "value": "?"}], "answer": "2"}
    assert accepted(human, "vlm_r1").answer == accepted(human, "sharegpt").answer == "2"
    alpaca = accepted({"instruction": "?", "output": "1", "answer": "2", "solution": "3"}, "alpaca")
    assert (alpaca.answer, alpaca.columns["answer"]) == ("3", "2")


def test_pixel_limits_of_a_row_with_videos_alone_are_refused():
    row = refused({"messages": [USER], "videos": ["a.mp4"], "max_pixels": 1000})
    assert (row.field, row.reason) == (
        "max_pixels",
        "limits images, but the row has only videos; set data.video.max_pixels",
    )


def test_frames_may_be_embedded():
    row = accepted({"messages": [USER], "videos": [{"frames": [{"bytes": b"x"}]}]})
    assert row.videos[0].frames == (ImageSource(data=b"x"),)


def test_points_and_objects_as_json_text():
    messages = [
        {"role": "user", "content": "<image>Open <ref-object>"},
        {"role": "assistant", "content": "click(<bbox>)"},
    ]
    objects = {"ref": ["the page"], "bbox": [[61.5, 22]]}
    assert accepted({"messages": messages, "images": ["a.png"], "objects": objects}, "swift").boxes == ((61.5, 22),)
    text = accepted({"messages": messages, "images": ["a.png"], "objects": json.dumps(objects)}, "swift")
    assert text.boxes == ((61.5, 22),) and contents(text)[0] == "<image>Open the page"
    shares = {**objects, "bbox": [[0.5, 0.5]], "bbox_type": "norm1"}
    assert accepted({"messages": messages, "images": ["a.png"], "objects": shares}, "swift").boxes == ((50, 25),)
    own = {"messages": [{"role": "user", "content": "<image><bbox>"}], "images": ["a.png"], "boxes": [[61.5, 22]]}
    assert accepted(own).boxes == ((61.5, 22),)


def test_boxes_in_the_space_that_the_recipe_names():
    """The picture has 100 x 50 pixels."""
    row = {
        "messages": [{"role": "user", "content": "<image><bbox>"}],
        "images": ["a.png"],
        "boxes": [[100, 200, 500, 1000]],
    }
    found = accepted(row, box_space="thousandths")
    assert found.boxes == ((10, 10, 50, 50),) and found.answer_space == "thousandths"
    assert accepted({**row, "boxes": [[0.1, 0.2, 0.5, 1]]}, box_space="unit").boxes == ((10, 10, 50, 50),)
    assert accepted({**row, "boxes": [[500, 1000]]}, box_space="thousandths").boxes == ((50, 50),)
    outside = refused({**row, "boxes": [[100, 200, 500, 1100]]}, box_space="thousandths")
    assert outside.field == "boxes[0]" and "lies outside its picture of 100 x 50" in outside.reason
    shares = {"bbox": [[0.1, 0.2, 0.5, 1]], "bbox_type": "norm1"}
    record = {"messages": row["messages"], "images": ["a.png"], "objects": shares}
    assert accepted(record, "swift", box_space="thousandths").boxes == ((10, 10, 50, 50),)
    coco = {"image": "a.png", "bbox": [10, 10, 20, 20], "expression": "the cup"}
    assert accepted(coco, "refcoco", box_space="thousandths").answer_space == "pixels"


def test_the_picture_on_which_the_answers_boxes_lie():
    asked, answered = {"role": "user", "content": "<image><image>Where?"}, {"role": "assistant", "content": "<bbox>"}
    row = {"messages": [asked, answered], "images": ["a.png", "b.png"], "boxes": [[1, 2, 3, 4]], "answer": [1, 2, 3, 4]}
    assert accepted(row).answer_image == 0
    assert accepted({**row, "box_images": [1]}).answer_image == 1
    assert accepted({**row, "box_images": [1], "answer_image": 0}).answer_image == 0
    several = {
        **row,
        "messages": [{**asked, "content": "<image><image><bbox>?"}, answered],
        "boxes": [[1, 2, 3, 4]] * 2,
    }
    assert accepted({**several, "box_images": [0, 1]}).answer_image == 1
    both = {**row, "messages": [asked, {**answered, "content": "<bbox><bbox>"}], "boxes": [[1, 2, 3, 4]] * 2}
    assert accepted({**both, "box_images": [0, 1]}).answer_image is None
    assert refused({**row, "answer_image": 2}).field == "answer_image"
    swift = {"messages": [asked, answered], "images": ["a.png", "b.png"], "solution": [1, 2, 3, 4]}
    assert accepted({**swift, "objects": {"bbox": [[1, 2, 3, 4]], "image_id": [1]}}, "swift").answer_image == 1


def test_the_place_of_the_answers_picture_counts_videos():
    row = {"messages": [{"role": "user", "content": "<video><image><image>Where?"}], "answer": [1, 2, 3, 4]}
    row |= {"videos": ["a.mp4"], "images": ["a.png", "b.png"]}
    assert accepted(row).answer_visual == 1 and accepted({**row, "answer_image": 1}).answer_visual == 2


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()


@pytest.mark.parametrize(
    ("given", "data"),
    [
        (PNG, base64.b64decode(PNG)),
        ("data:image/png;base64," + PNG, base64.b64decode(PNG)),
        ("data:image/jpeg;charset=utf-8;base64,/9j/", b"\xff\xd8\xff"),
        (PNG[:40] + "\n" + PNG[40:] + "\n", base64.b64decode(PNG)),
        ({"bytes": PNG, "path": "a.png"}, base64.b64decode(PNG)),
        ({"bytes": None, "path": PNG}, base64.b64decode(PNG)),
        ("/9j/" + "A" * 96, base64.b64decode("/9j/" + "A" * 96)),
        ("UklGR" + "A" * 95, base64.b64decode("UklGR" + "A" * 95)),
    ],
)
def test_pictures_as_base64_are_read(given, data):
    for key, value in (("images", [given]), ("image", given)):
        (image,) = accepted({key: value, "messages": [USER]}).images
        assert image.data == data and image.path in (None, "a.png")


def test_broken_base64_is_told_in_a_short_line_and_paths_stay_paths():
    for broken in (PNG + "*" * 5000, "data:image/png;base64," + PNG * 50 + "="):
        found = refused({"images": [broken], "messages": [USER]})
        assert found.field == "images[0]" and "base64" in found.reason and len(found.reason) < 150
    assert refused({"images": ["data:image/png," + "x" * 9000], "messages": [USER]}).reason.count("x") < 300
    for path in ("iVBORw0KGgo/" + "a/" * 40 + "b.png", "iVBORw0KGgo", "/9j/a.jpg"):
        found = parse({"images": [path], "messages": [USER]})
        assert isinstance(found, RejectedRow) or found.images == (ImageSource(path=path),)


TEXT_PART, IMAGE_PART = {"type": "text", "text": "What is it?"}, {"type": "image"}


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (json.dumps([IMAGE_PART, TEXT_PART]), "<image>What is it?"),
        (json.dumps([{**IMAGE_PART, "text": None}, {**TEXT_PART, "image": None}], indent=1), "<image>What is it?"),
        (json.dumps([TEXT_PART]), "What is it?"),
        (json.dumps([{"type": "text", "bbox": [1, 2]}]), None),  # an answer that is JSON itself
        (json.dumps([{**TEXT_PART, "label": "title"}]), None),
        ('[{"type": "text", "text"', None),
        ("[{'type': 'table'}]", None),
    ],
)
def test_parts_may_be_json_text(content, read):
    """Tables whose columns have one type store parts as text, beside turns that are text."""
    asked = {"role": "user", "content": content}
    images = ["a.png"] if read is None or "<image>" in read else []
    row = accepted({"messages": [asked], "images": images, "answer": 1}, "tiercel")
    assert row.messages[0].content == (f"<image>{content}" if read is None else read)


PATH_PART = str([{"type": "image", "image": "a.png"}])


@pytest.mark.parametrize("written", (str([TEXT_PART]), str([IMAGE_PART, TEXT_PART]), PATH_PART))
def test_parts_as_text_that_cannot_be_read_are_refused(written):
    found = refused({"messages": [{"role": "user", "content": written}], "images": ["a.png"]}, "tiercel")
    assert found.field.startswith("messages[0].content")


GEOMETRY = {
    "images": ["a.png"],
    "problem": "<image>Find x.",
    "answer": "5",
    "id": 3,
    "choices": ["4", "5"],
    "ground_truth": "B",
}
VERL = {
    "data_source": "geo",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "<image>Find x."}],
    "images": ["a.png"],
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 1},
}
QUESTION = {"image": "a.png", "question": "<image>Find x.", "answer": "5"}


def test_the_prompt_of_verl_comes_before_the_raw_question():
    row = accepted({**VERL, "problem": "Find x.", "question": "x?"}, "verl")
    assert contents(row) == ["Think.", "<image>Find x.", "5"] and row.answer == "5"


def test_questions_with_answers_are_told_by_their_keys():
    assert detect_format([GEOMETRY], "f") == detect_format([QUESTION], "f") == "qa"
    assert detect_format([VERL], "f") == "verl"
    with pytest.raises(DataError, match="could have the format qa or vlm_r1"):  # is the answer `answer` or `solution`?
        detect_format([{**GEOMETRY, "solution": "6"}], "f")
    assert detect_format([{**QUESTION, "chosen": "a", "rejected": "b"}], "f") == "rlhf_v"
    assert detect_format([{**QUESTION, "messages": [USER]}], "f") == "tiercel"


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"refcoco", "rlhf_v"}))
@pytest.mark.parametrize("record", (GEOMETRY, VERL, QUESTION))
def test_questions_with_answers_are_read_as_they_are_in_every_format(format, record):
    row = accepted(record, format)
    assert row.answer == "5" and row.images == (ImageSource(path="a.png"),)
    assert [turn.content for turn in row.messages if turn.role == "user"] == ["<image>Find x."]
    if record is GEOMETRY:
        assert row.columns["choices"] == ["4", "5"] and row.columns["ground_truth"] == "B"
    if record is VERL:
        assert row.columns["reward_model"]["ground_truth"] == "5"


def test_an_answer_beside_a_question_is_the_assistants_turn():
    assert contents(accepted(QUESTION, "qa", "sft")) == ["<image>Find x.", "5"]
    assert contents(accepted({**QUESTION, "answer": [1, 2, 3, 4]}, "qa", "sft"))[1] == "[1, 2, 3, 4]"
    assert contents(accepted({**QUESTION, "answer": 7}, "qa", "sft"))[1] == "7"
    assert refused({**QUESTION, "answer": ["a", "b"]}, "qa", "sft").reason == "there is no assistant turn to train on"
    assert accepted({**QUESTION, "answer": ["a", "b"]}, "qa").answer == ["a", "b"]
    assert refused({"question": None, "answer": "5"}, "qa").field == "question"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"\0\1", "bytes"),
        (datetime.datetime(2025, 3, 1), "datetime"),
        ({"bytes": b"x", "path": None}, "bytes"),
        ([{"at": datetime.date(2025, 3, 1)}], "date"),
        (decimal.Decimal("1.5"), "Decimal"),
    ],
)
def test_a_column_of_another_type_that_nothing_reads_is_left_out(value, kind):
    row = accepted({"messages": [USER], "answer": "7", "mask": value, "kind": "a"})
    assert row.columns == {"kind": "a"} and row.left_out == (("mask", kind),) and row.answer == "7"
    for key in ("answer", "messages", "boxes"):
        found = refused({"messages": [USER], "answer": "7", "boxes": [], key: value})
        assert found.field.startswith(key) and f"of type {kind}" in found.reason


def test_ids_by_line_leave_the_rows_own_to_the_rewards():
    row = accepted({"id": 7, "messages": [USER]}, ids="line")
    assert row.id == "rec:4" and row.columns == {"id": 7}
    assert accepted({"id": 7, "messages": [USER]}).columns == {}
    assert accepted({"id": [1], "messages": [USER]}, ids="line").id == "rec:4"


ANSWERED = [{"role": "assistant", "content": "5"}]
ASKED = [{"role": "user", "content": "<image>Find x."}]


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({**VERL, "prompt": json.dumps(VERL["prompt"])}, "verl"),
        ({"prompt": json.dumps(ASKED), "completion": " [{ " + json.dumps(ANSWERED)[2:], "images": ["a.png"]}, "trl"),
        ({"messages": json.dumps([*ASKED, *ANSWERED]), "images": ["a.png"]}, "tiercel"),
        ({"conversations": '[{"from": "human", "value": "<image>Find x."}]', "image": "a.png", "answer": 5}, "vlm_r1"),
        ({"question": json.dumps(ASKED), "answer": 5.0, "images": ["a.png"]}, "qa"),
    ],
)
def test_turns_as_json_text(record, format):
    row = accepted(record, format)
    assert [turn.content for turn in row.messages if turn.role == "user"] == ["<image>Find x."]
    assert all(turn.content == "5" for turn in row.messages if turn.role == "assistant")


def test_sides_of_a_pair_as_json_text():
    record = {"prompt": json.dumps(ASKED), "chosen": json.dumps(ANSWERED), "rejected": "6", "images": ["a.png"]}
    row = parse(record, format="trl", purpose="pairs")
    assert [contents(side) for side in row.sides] == [["<image>Find x.", "5"], ["<image>Find x.", "6"]]


def test_turns_as_python_prints_them_are_refused_and_other_texts_are_questions():
    for key, format in (("prompt", "verl"), ("messages", "tiercel"), ("question", "qa")):
        record = {key: str(ASKED), "answer": "5", "images": ["a.png"]}
        assert refused(record, format).field == key
    for text in ('[{"role": "user"', '[{"rule": "a"}]', 'Read [{"role": "user"}]', "[{'x': 1}]"):
        assert contents(accepted({"question": text, "answer": "5"}, "qa"))[0] == text


def test_a_whole_number_of_a_column_of_fractions_is_answered_as_one():
    turns = [contents(accepted({**QUESTION, "answer": each}, "qa", "sft"))[1] for each in (5.0, 5, 0.5, [5.0, 1])]
    assert turns == ["5", "5", "0.5", "[5.0, 1]"]

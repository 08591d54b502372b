"""What is told about rows that can be used. Boxes: tests/cli/test_check.py."""

import json

import pytest
from PIL import Image

from tiercel.config.data import Data
from tiercel.data.odd_rows import odd_lines
from tiercel.data.reading import read_rows
from tiercel.data.rows import given_size
from tiercel.errors import DataError

ASKED = {"question": "What is it?", "answer": "a cup"}


def lines(tmp_path, *files, purpose="grpo", **data):
    for number, rows in enumerate(files):
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Data(train=str(tmp_path / "*.jsonl"), **data)
    return odd_lines(config, read_rows(config.train, config, purpose), is_learnt=purpose == "sft")


@pytest.mark.parametrize(
    ("column", "value", "is_told"),
    [
        ("image_path", "a.png", True),
        ("Image", "pictures/cup of tea.JPG", True),
        ("file_name", "https://example.com/a.webp", True),
        ("pictures", ["a.png", "b.jpeg"], True),
        ("photo", {"path": "a.png", "bytes": None}, True),
        ("img", "data:image/png;base64,iVBORw0KGgo=", True),
        ("source", "coco", False),
        ("page", "see a.png\nand b.png", False),
        ("pictures", [], False),
    ],
)
def test_a_column_of_pictures_that_is_not_read_is_told(tmp_path, column, value, is_told):
    told = lines(tmp_path, [{**ASKED, column: value}] * 2)
    assert [f"data.columns: {{images: {column}}}" in line for line in told] == [True] * is_told
    assert lines(tmp_path, [{**ASKED, column: value, "image": "a.png"}, {**ASKED, column: value}]) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("video_path", "falls.mp4"), ("clip", {"path": "a/b.WEBM"}), ("video_file", ["a.mkv", "b.avi"])],
)
def test_a_column_of_videos_that_is_not_read_is_told(tmp_path, column, value):
    (told,) = lines(tmp_path, [{**ASKED, column: value}] * 2)
    assert "has a video" in told and f"data.columns: {{videos: {column}}}" in told
    assert lines(tmp_path, [{**ASKED, column: "falls"}, {**ASKED, column: value}]) == []


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [("video", "clip", "falls.mp4"), ("image", "img", "a.png"), ("image", "pics", ["a.png"])],
)
def test_marks_without_files_name_the_column_that_has_them(tmp_path, kind, column, value):
    rows = [{"question": f"<{kind}>What?", "answer": "a cup", column: value}]
    with pytest.raises(DataError, match=rf"number of {kind}s is 0; .* data.columns: {{{kind}s: {column}}}"):
        lines(tmp_path, rows)
    with pytest.raises(DataError, match=rf"number of {kind}s is 0$"):
        lines(tmp_path, [{**rows[0], column: "none"}])


PICTURED = {"question": "Which colour?", "answer": "A", "image": "a.png"}


@pytest.mark.parametrize("name", ["image_2", "image2", "Image 3", "img-1", "picture_2"])
def test_further_pictures_beside_those_that_are_read_are_told(tmp_path, name):
    (told,) = lines(tmp_path, [PICTURED, {**PICTURED, name: "b.png"}])
    assert f"the columns {name} seem to name further pictures" in told
    assert lines(tmp_path, [{**PICTURED, "images": ["a.png", "b.png"], "image": None, name: "none"}]) == []
    assert lines(tmp_path, [{**PICTURED, "file_name": "a.png", "image_id": 2}]) == []


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"options": ["A. red", "B. blue"]}, r"{prompt}\n{options}"),
        ({"choices": {"A": "red", "B": "blue"}}, r"{prompt}\n{choices}"),
        ({"options": "['red', 'blue']"}, r"{prompt}\n{options}"),
        ({"answer_choices": ["red", "blue"]}, r"{prompt}\n{answer_choices}"),
        ({"A": "red", "B": "blue", "C": None}, r"{prompt}\n{A}\n{B}"),
        ({"option_a": "red", "option_b": "blue"}, r"{prompt}\n{option_a}\n{option_b}"),
    ],
)
def test_choices_that_the_questions_do_not_have_are_told(tmp_path, columns, prompt):
    row = {**PICTURED, **columns}
    (told,) = lines(tmp_path, [row] * 2)
    assert "so the model will not see them" in told and told.endswith(f'data.prompt: "{prompt}"')
    assert lines(tmp_path, [{**row, "question": "Which colour, A (red) or (B) Blue?"}] * 2) == []
    assert lines(tmp_path, [row] * 2, prompt=prompt.replace(r"\n", "\n")) == []


@pytest.mark.parametrize(("name", "value"), [("options", ["red"]), ("choice", "B"), ("direct_answers", ["a", "b"])])
def test_other_columns_are_not_taken_for_choices(tmp_path, name, value):
    assert lines(tmp_path, [{**PICTURED, name: value}]) == []


def test_right_answers_that_are_numbers_of_choices_are_told(tmp_path):
    choices, number = lines(tmp_path, [{**PICTURED, "choices": ["red", "blue"], "answer": 1}] * 2)
    assert "will not see them" in choices and "such as 1, beside choices" in number
    assert len(lines(tmp_path, [{**PICTURED, "choices": ["1750", "1815"], "answer": 1750}])) == 1


def test_each_file_is_looked_at(tmp_path):
    (told,) = lines(tmp_path, [{**ASKED, "image": "a.png"}], [{**ASKED, "image_path": "a.png"}])
    assert str(tmp_path / "1.jsonl") in told


def conversation(answer, **columns):
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


@pytest.mark.parametrize("column", ("reasoning", "Rationale", "chain_of_thought"))
def test_thoughts_in_a_column_of_rows_with_answers_to_learn_are_told(tmp_path, column):
    rows = [conversation("A cup."), conversation("A cup.", **{column: "It has a handle."})]
    (told,) = lines(tmp_path, rows, purpose="sft")
    assert f"the column {column} seems to have thoughts" in told
    thought = "<think>It has a handle.</think>A cup."
    assert lines(tmp_path, [conversation(thought, **{column: "It has a handle. "})], purpose="sft") == []
    assert lines(tmp_path, [conversation("A cup.", **{column: 3})], purpose="sft") == []
    assert lines(tmp_path, rows) == []  # GRPO learns from its own answers


def test_a_system_column_that_a_format_does_not_read_is_told(tmp_path):
    (told,) = lines(tmp_path, [{"prompt": "?", "completion": "A cup.", "system_prompt": "Be brief."}])
    assert "the column system_prompt has texts, which the model will not see" in told
    assert lines(tmp_path, [{"messages": [{"role": "user", "content": "?"}], "system": "Be brief."}]) == []


def test_answers_that_end_a_thought_without_its_beginning_are_told(tmp_path):
    rows = [conversation("A handle.</think>A cup."), conversation("<think>A handle.</think>A cup.")]
    (told,) = lines(tmp_path, rows, purpose="sft")
    assert "1 of the first 2 answers end a thought with </think>" in told


def test_a_system_turn_of_the_recipe_that_rows_replace_is_told(tmp_path):
    own = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]}
    rows = [own, {"messages": own["messages"][1:]}]
    assert lines(tmp_path, rows) == []
    assert lines(tmp_path, rows, system="Think.") == [
        "data.system is not used for 1 of the first 2 rows, which have a system turn"
    ]


def test_a_data_set_of_which_files_are_missing_is_told(tmp_path):
    row = json.dumps(ASKED) + "\n"
    for number in (0, 2):
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_text(row)
    (tmp_path / "eval-00000-of-00001.jsonl").write_text(row)
    config = Data(train=str(tmp_path / "*-of-*.jsonl"))
    (told,) = odd_lines(config, read_rows(config.train, config, "grpo"), is_learnt=False)
    assert told.startswith(f"{tmp_path}/train: only 2 of its 3 files are here")


def test_texts_of_the_recipe_that_mean_something_else_are_told(tmp_path):
    (tmp_path / "system.txt").write_text("Think.")
    named, typed = {"system": str(tmp_path / "system.txt")}, {"prompt": r"{prompt}\nAnswer."}
    (told,) = lines(tmp_path, [ASKED], **named)
    assert told.startswith(f"data.system: {tmp_path}/system.txt is a file")
    (told,) = lines(tmp_path, [ASKED], **typed)
    assert told.startswith("data.prompt has a backslash and an n")
    assert lines(tmp_path, [ASKED], system="Use \\neq.\nThink.", prompt="x" * 5000) == []


@pytest.mark.parametrize("width", (float("nan"), float("inf"), 640.5, "640", None))
def test_a_size_that_is_no_number_of_pixels_is_not_read(width):
    assert given_size({"width": width, "height": 480}) is None
    assert given_size({"image_width": 640.0, "image_height": 480, "width": width}) == (640, 480)


def test_frames_without_a_rate_are_told(tmp_path):
    """ms-swift 6523, Qwen3-VL 1992: frames that were taken once a second count as two a second."""
    for name in ("0.png", "1.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    frames = ["0.png", "1.png"]
    (told,) = lines(tmp_path, [{**ASKED, "videos": [frames]}, {**ASKED, "videos": [{"frames": frames, "fps": 1}]}])
    assert (
        "1 of the first 2 rows have videos as lists of frames without fps, so they count as 2 frames a second" in told
    )
    assert lines(tmp_path, [{**ASKED, "videos": [frames]}], video={"fps": 1}) == []
    assert lines(tmp_path, [{**ASKED, "videos": ["a.mp4"]}]) == []


@pytest.mark.parametrize("names", [("video_start", "video_end"), ("start_frame", "end_frame")])
def test_columns_that_name_a_part_of_a_video_are_told(tmp_path, names):
    """As qwen-vl-utils takes them in a part, and LongViTU's segments: the whole video is read here."""
    part = dict(zip(names, (3, 9), strict=True))
    (told,) = lines(tmp_path, [{**ASKED, "videos": ["a.mp4"], **part}])
    assert f"the columns {', '.join(names)} seem to name a part of each video" in told
    assert lines(tmp_path, [{**ASKED, "image": "a.png", **part}]) == []

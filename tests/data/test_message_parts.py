"""Pictures and videos that stand in the parts of turns are read as if their columns had them."""

import base64
import json

import pytest

from tests.data.test_formats import ASSISTANT, accepted, contents, refused
from tiercel.data.formats.message_parts import with_visuals_of_parts
from tiercel.data.formats.registry import detect_format
from tiercel.types import ImageSource, VideoSource

TEXT = {"type": "text", "text": "What is it?"}
PICTURES = [
    {"type": "image", "image": "a.png"},
    {"type": "image", "url": "a.png", "text": None},
    {"type": "image", "path": "a.png"},
    {"type": "image", "base64": None, "image": "a.png"},
    {"type": "image", "image": {"bytes": None, "path": "a.png"}},
    {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
    {"type": "image_url", "image_url": "a.png"},
    {"type": "input_image", "image_url": "a.png"},
]


def asked(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("part", PICTURES)
def test_every_form_of_a_picture_stands_where_its_part_is(part):
    row = accepted({"messages": [*asked(TEXT, part), ASSISTANT]}, purpose="sft")
    assert contents(row) == ["What is it?<image>", "There."]
    assert (row.images, row.columns) == ((ImageSource(path="a.png"),), {})


@pytest.mark.parametrize(
    ("format", "turns"),
    [
        ("swift", {"messages": asked(*PICTURES[:1], TEXT), "solution": "red"}),
        ("trl", {"prompt": asked(*PICTURES[:1], TEXT), "answer": "red"}),
        ("qa", {"question": asked(*PICTURES[:1], TEXT), "answer": "red"}),
        ("verl", {"prompt": asked(*PICTURES[:1], TEXT), "reward_model": {"ground_truth": "red"}}),
        ("vlm_r1", {"conversations": [{"from": "human", "value": [PICTURES[0], TEXT]}], "solution": "red"}),
        ("openai", {"messages": asked(*PICTURES[:1], {**TEXT, "type": "input_text"}), "answer": "red"}),
    ],
)
def test_every_format_with_turns_reads_them(format, turns):
    row = accepted(turns, format=format)
    assert contents(row)[0] == "<image>What is it?"
    assert (row.images, row.answer) == ((ImageSource(path="a.png"),), "red")


def test_a_question_beside_a_conversation_brings_no_pictures():
    copy = asked({"type": "image", "image": {"bytes": b"\x89PNG"}}, TEXT)
    row = accepted({"messages": [*asked(PICTURES[0], TEXT), ASSISTANT], "prompt": copy}, purpose="sft")
    assert row.images == (ImageSource(path="a.png"),) and contents(row) == ["<image>What is it?", "There."]
    turns = [{"from": "human", "value": [PICTURES[0], TEXT]}]
    row = accepted({"conversations": turns, "prompt": asked(PICTURES[0]), "solution": "red"}, "vlm_r1")
    assert len(row.images) == 1


def test_bytes_videos_and_text_that_is_json():
    picture = {"type": "image", "image": {"bytes": b"\x89PNG", "path": "b.png"}}
    film = {"type": "video", "video": {"path": "c.mp4", "fps": 2}}
    row = accepted({"messages": [*asked(picture, film, TEXT), *asked({"type": "image"})][:1]})
    assert row.images == (ImageSource(path="b.png", data=b"\x89PNG"),)
    assert row.videos == (VideoSource(path="c.mp4", frames=(), fps=2.0),)
    assert contents(row) == ["<image><video>What is it?"]
    written = [{"role": "user", "content": json.dumps([PICTURES[0], TEXT])}]
    assert contents(accepted({"messages": written})) == ["<image>What is it?"]


def test_base64_and_the_rate_of_frames_beside_their_address():
    whole = "iVBORw0KGgo" + "A" * 61
    row = accepted({"messages": asked({"type": "image", "base64": whole}, TEXT)})
    assert row.images == (ImageSource(data=base64.b64decode(whole)),)
    films = [{"type": "video", "video": "c.mp4", "fps": 2}, {"type": "video", "video": ["0.png", "1.png"], "fps": 4}]
    row = accepted({"messages": asked(*films, TEXT)})
    described = [(video.path, len(video.frames), video.fps) for video in row.videos]
    assert described == [("c.mp4", 0, 2.0), ("0.png", 2, 4.0)]
    twice = {"type": "video", "video": {"path": "c.mp4", "fps": 2}, "fps": 4}
    assert refused({"messages": asked(twice, TEXT)}).field == "messages[0].content[0]"
    assert "fps" in refused({"messages": asked({**PICTURES[0], "fps": 2}, TEXT)}).reason


def test_a_part_with_two_addresses_is_refused():
    row = refused({"messages": asked({**PICTURES[0], "url": "b.png"}, TEXT)})
    assert row.field == "messages[0].content[0]" and "image and url" in row.reason


def test_a_column_that_says_the_same_may_stand_beside_them():
    turns = asked(*PICTURES[:1], TEXT)
    assert accepted({"messages": turns, "images": ["a.png"]}).images == (ImageSource(path="a.png"),)
    assert accepted({"messages": turns, "image": "a.png"}).images == (ImageSource(path="a.png"),)
    assert refused({"messages": turns, "images": ["b.png"]}).field == "images"
    assert refused({"messages": turns, "image": "b.png"}).field == "image"


def test_pairs_whose_sides_repeat_the_question():
    turns = asked(*PICTURES[:1], TEXT)
    sides = {"chosen": [*turns, ASSISTANT], "rejected": [*turns, {**ASSISTANT, "content": "Here."}]}
    row = accepted(sides, format="trl", purpose="pairs")
    assert [each.images for each in row.sides] == [(ImageSource(path="a.png"),)] * 2
    assert contents(row) == ["<image>What is it?", "There."]
    row = accepted({"prompt": turns, **sides}, format="trl", purpose="pairs")
    assert [each.images for each in row.sides] == [(ImageSource(path="a.png"),)] * 2
    completed = {"prompt": turns, "completion": sides["chosen"]}
    assert accepted(completed, format="trl", purpose="sft").images == (ImageSource(path="a.png"),)


def test_pairs_whose_sides_have_other_pictures():
    film = {"type": "video", "video": "c.mp4"}
    chosen = [*asked(*PICTURES[:1], film, TEXT), ASSISTANT]
    other = {**PICTURES[0], "image": "b.png"}
    row = accepted({"chosen": chosen, "rejected": [*asked(other, TEXT), ASSISTANT]}, format="trl", purpose="pairs")
    assert [each.images for each in row.sides] == [(ImageSource(path="a.png"),), (ImageSource(path="b.png"),)]
    assert [len(each.videos) for each in row.sides] == [1, 0]
    answer = {"role": "assistant", "content": [other]}
    assert refused({"chosen": chosen, "rejected": [answer]}, format="trl", purpose="pairs").field == "rejected"


def test_a_record_without_such_parts_is_left_alone():
    record = {"messages": asked({"type": "image"}, TEXT), "images": ["a.png"]}
    assert with_visuals_of_parts(record) is record


def test_parts_that_say_again_which_picture_they_are():
    """As the rows of llava-instruct-mix-vsft, in which all parts have the same keys."""
    pictures = [{"type": "image", "index": number, "text": None} for number in (0, 1)]
    text = {**TEXT, "index": None}
    columns = {"images": ["a.png", "b.png"]}
    row = accepted({"messages": [*asked(text, *pictures), ASSISTANT], **columns})
    assert contents(row) == ["What is it?<image><image>", "There."]
    later = [*asked(pictures[0], text), ASSISTANT, *asked(pictures[1], text), ASSISTANT]
    assert contents(accepted({"messages": later, **columns}))[::2] == ["<image>What is it?"] * 2
    sides = {"chosen": later[:2], "rejected": [*later[:1], {**ASSISTANT, "content": "Here."}], "images": ["a.png"]}
    row = accepted({"prompt": later[:1], **sides}, format="trl", purpose="pairs")
    assert [each.images for each in row.sides] == [(ImageSource(path="a.png"),)] * 2


@pytest.mark.parametrize(("numbers", "place"), [((1, 0), 0), ((0, 0), 1), ((0, 2), 1), (("0", 1), 0)])
def test_pictures_that_are_numbered_in_another_order_are_refused(numbers, place):
    parts = [{"type": "image", "index": number} for number in numbers]
    row = refused({"messages": [*asked(*parts, TEXT), ASSISTANT], "images": ["a.png", "b.png"]})
    assert row.field == f"messages[0].content[{place}]"
    assert f"has index {numbers[place]!r}, but is picture {place} of the row" in row.reason


def test_a_picture_as_anthropic_writes_it():
    whole = "iVBORw0KGgo" + "A" * 61
    base64_of = {"type": "base64", "media_type": "image/png", "data": whole}
    row = accepted({"messages": asked({"type": "image", "source": base64_of}, TEXT)})
    assert row.images == (ImageSource(data=base64.b64decode(whole)),)
    assert contents(row) == ["<image>What is it?"]
    row = accepted({"messages": asked({"type": "image", "source": {"type": "url", "url": "a.png"}}, TEXT)})
    assert row.images == (ImageSource(path="a.png"),)
    for odd in ({"type": "file", "file_id": "f"}, {"type": "base64"}, {}):
        assert "it must be a path" in refused({"messages": asked({"type": "image", "source": odd}, TEXT)}).reason


def test_the_rate_of_frames_as_qwen_names_it():
    """ms-swift 6523: frames that were taken once a second count as taken twice a second, if nothing says so."""
    frames = ["0.png", "1.png"]
    for film in (
        {"type": "video", "video": frames, "sample_fps": 1},
        {"type": "video", "video": {"frames": frames, "sample_fps": 1.0}},
    ):
        (video,) = accepted({"messages": asked(film, TEXT)}).videos
        assert (len(video.frames), video.fps) == (2, 1.0)
    for column in ({"type": "video", "video": frames, "sample_fps": 1}, {"frames": frames, "sample_fps": 1}):
        (video,) = accepted({"messages": asked(TEXT), "videos": [column]}).videos
        assert (len(video.frames), video.fps) == (2, 1.0)
    for film in (
        {"type": "video", "video": "c.mp4", "sample_fps": 1},  # of a file it says nothing
        {"type": "video", "video": frames, "fps": 2, "sample_fps": 1},
        {"type": "video", "video": "c.mp4", "nframes": 8},
    ):
        assert "can have only its address and fps; remove" in refused({"messages": asked(film, TEXT)}).reason
    limited = {"type": "image", "image": "a.png", "max_pixels": 360 * 420}
    reason = refused({"messages": asked(limited, TEXT)}).reason
    assert "remove max_pixels: min_pixels and max_pixels of the row" in reason


def test_pictures_that_are_named_by_their_marks():
    """As in MiniCPM-V's rows of several pictures (MiniCPM-V 233)."""
    answered = {"role": "assistant", "content": "No."}
    row = {
        "image": {"<image_00>": "a.png", "<image_01>": "b.png", "<image_02>": None},
        "conversations": [{"role": "user", "content": "Is <image_01> like <image_00>?"}, answered],
    }
    read = accepted(row, format="vlm_r1")
    assert [image.path for image in read.images] == ["b.png", "a.png"]
    assert contents(read)[0] == "Is <image> like <image>?"
    (turn, _), more = row["conversations"], {**row["image"], "<image_02>": "c.png"}
    unseen = refused({**row, "image": more}, format="vlm_r1")
    assert "names a picture by the mark <image_02>, but no turn contains" in unseen.reason
    assert "but it must be a path" in refused({**row, "image": {"first": "a.png"}}, format="vlm_r1").reason
    plain = {"image": {"path": "a.png", "bytes": None}, "conversations": [{**turn, "content": "?"}, answered]}
    assert contents(accepted(plain, format="vlm_r1"))[0] == "<image>?"


def test_turns_that_are_pairs():
    """As in the_cauldron, Docmatix and FineVision."""
    pairs = [{"user": "What?", "assistant": "A cup.", "source": "ai2d"}, {"user": "Why?", "assistant": "Tea."}]
    row = {"images": [{"bytes": b"\x89PNG", "path": None}], "texts": pairs}
    assert detect_format([{"texts": None}, row], "rows.parquet") == "tiercel"
    read = accepted(row, purpose="sft")
    assert contents(read) == ["<image>What?", "A cup.", "Why?", "Tea."]
    assert [message.role for message in read.messages] == ["user", "assistant"] * 2 and read.columns == {}
    for texts in ([], ["What?"], [{"user": "What?"}], [{**pairs[0], "image": 1}]):
        assert refused({**row, "texts": texts}).field == "messages"
    assert accepted({"messages": asked(TEXT), "texts": pairs}).columns == {"texts": pairs}
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cup."}]
    read = accepted({"conversations": turns, "texts": pairs}, format="sharegpt", purpose="sft")
    assert contents(read) == ["What?", "A cup."] and read.columns == {"texts": pairs}

"""Trajectories on the page, from records made by hand."""

from dataclasses import replace

import pytest
from PIL import Image

from tests.web.report.fake_runs import call, completion, group, turn
from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.pictures import Album
from tiercel.web.report.templates import environment
from tiercel.web.report.turns import asked_outlines, is_asked

SHA = "ab" * 32


def drawn(folder, made: tuple[GroupRecord, CompletionRecord], style: str = "after") -> str:
    return str(environment().get_template("cards.html").module.completion(Album(folder), *made, style))


def image(size: tuple[int, int], processed: tuple[int, int], sha256: str = SHA) -> dict:
    return {"sha256": sha256, "path": None, "original_size": list(size), "processed_size": list(processed)}


def record(turns: list[dict], space: str | None = "thousandths", **more) -> tuple[GroupRecord, CompletionRecord]:
    """A group of one trajectory on an image of 100 x 200 that the model saw at half its size."""
    made = completion("Seven.", {"exact": 1.0, "format": 1.0}, True, turns=turns, **more)
    found = GroupRecord.from_json(group("a", "?", "7", [image((100, 200), (50, 100))], [made], space))
    return found, found.completions[0]


@pytest.mark.parametrize(
    ("space", "box"),
    [("resized_pixels", [5, 10, 30, 40]), ("thousandths", [100, 100, 600, 400]), ("unit", [0.1, 0.1, 0.6, 0.4])],
)
def test_what_a_tool_is_asked_for_is_mapped_to_its_picture(space, box):
    made = record([turn("Look.", [call("zoom", box=box)])], space)
    (outline,) = asked_outlines(*made, "gained", "completion 3", "3")
    assert outline.box == pytest.approx((10, 20, 60, 80)) and outline.image == 0
    assert (outline.style, outline.label, outline.tag) == ("gained asked", "completion 3, zoom", "3")


def test_later_pictures_are_counted_after_those_of_the_prompt():
    turns = [
        turn("a", [call("zoom", box=[0, 0, 500, 500])], "<image>", [image((40, 20), (80, 40))]),
        turn("b", [call("mark", point=[500, 500], image=2)], "<image>", [image((60, 60), (60, 60))]),
        turn("c", [call("crop", box=[0, 0, 1000, 1000], image=3.0)], "error"),
    ]
    found = asked_outlines(*record(turns), "after", "after")
    assert [outline.image for outline in found] == [0, 1, 2]
    assert found[1].box == pytest.approx((20 - 1.2, 10 - 1.2, 20 + 1.2, 10 + 1.2))  # 3 % of 40 around the point
    assert found[2].box == (0, 0, 60, 60)


def test_what_cannot_be_drawn_is_left_out():
    wrong = [{"box": [1, 2, 3]}, {"box": "1"}, {"point": [1, None]}, {"box": [1, 2, 3, 4], "image": 2}, {}]
    wrong += [{"box": [1, 2, 3, 4], "image": number} for number in (0, -1, 1.5, True, "1", None, 10**400)]
    turns = [turn("a", [call("zoom", **arguments)], "error") for arguments in wrong]
    assert asked_outlines(*record(turns), "after", "after") == []
    made, _ = record([turn("a", [call("zoom", box=[1, 2, 3, 4])])])
    assert is_asked(made) and not is_asked(replace(made, coordinate_space=None))


def test_turns_are_shown_in_order_with_pictures_at_their_marks(tmp_path):
    other = "cd" * 32
    for sha256 in (SHA, other):
        Image.new("RGB", (40, 20)).save(tmp_path / f"{sha256}.png")
    pictures = [image((40, 20), (40, 20)), image((40, 20), (40, 20), other)]
    turns = [
        turn("I <look>.", [call("zoom", box=[1, 2, 3, 4], label="é")], "left <image> middle <image> right", pictures),
        turn("Closer.", [call("zoom", "there is no image 9", box=[0, 0, 500, 500], image=3), call("peek")], "blocked"),
        turn("Seven."),
    ]
    page = drawn(tmp_path, record(turns), "gained")
    shown = ["I &lt;look&gt;.", "zoom(box=[1, 2, 3, 4], label=&quot;é&quot;)", "left ", f"image-{SHA}", "image 2, 40"]
    shown += [" middle ", f"image-{other}", "image 3, 40", " right", "Closer.", "failed: there is no image 9", "peek()"]
    places = [page.find(text) for text in [*shown, "blocked", "Seven."]]
    assert -1 not in places and places == sorted(places)
    assert page.count("outline gained asked") == 1
    assert page.index(f"image-{other}") < page.index("outline gained asked") < page.index(" right")


def test_what_the_policy_did_not_read_is_told_apart(tmp_path):
    turns = [turn("a", [call("zoom")], ""), turn("b", [call("zoom")], "image 2<image>")]
    page = drawn(tmp_path, record(turns))
    assert page.count("Came back:") == 1 and "(empty)" in page
    assert "the trajectory ended before the policy read it:" in page and "a picture that is not kept" in page


def test_of_many_turns_the_first_and_the_last_are_shown(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / f"{SHA}.png")
    turns = [turn(f"turn-{number}.", [], "<image>", [image((40, 20), (40, 20))]) for number in range(1, 40)]
    page = drawn(tmp_path, record([*turns, turn("turn-40.")]))
    assert "turn-11." in page and "turn-12." not in page and "turn-39." not in page and "turn-40." in page
    assert "Turns 12 to 39 are left out." in page
    assert page.count("<svg") == 11 and page.count("data:image/") == 1


def test_a_completion_of_one_turn_stays_as_it_was(tmp_path):
    assert drawn(tmp_path, record([])).strip() == '<pre class="said" dir="auto">Seven.</pre>'


def test_why_an_environment_failed_is_open_and_said_once(tmp_path):
    reason = "mine.py:Env, row 3: call: no answer within 10 s"
    failed = drawn(tmp_path, record([turn("a")], failures={"exact": reason, "format": reason}))
    assert failed.count(reason) == 1 and '<details class="failures" open>' in failed
    assert '<details class="failures"><summary' in drawn(tmp_path, record([], failures={"exact": "a", "format": "b"}))

import pytest
from PIL import Image

from tests.web.report.fake_runs import completion, group, make_empty, write_lines
from tiercel.runs.records import GroupRecord
from tiercel.web.report import pictures as report_pictures
from tiercel.web.report.boxes import Outline, box_of, predicted_box, true_box
from tiercel.web.report.cards import box_cell, overlap
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, read_groups, read_run
from tiercel.web.report.rollouts import shown_step
from tiercel.web.report.templates import environment

CARDS = environment().get_template("cards.html").module
SHA, OTHER = "ab" * 32, "cd" * 32


def record(
    tmp_path, text: str, answer=(10, 20, 60, 80), space: str | None = "resized_pixels", size=(100, 200), rewards=None
) -> GroupRecord:
    """A group of one completion on an image of 100 x 200 that the model saw at half its size."""
    path = make_empty(tmp_path / "run")
    image = {"sha256": SHA, "path": "a.png", "original_size": list(size), "processed_size": [50, 100]}
    made = completion(text, rewards or {"iou": 0.0}, None)
    answer = list(answer) if isinstance(answer, tuple) else answer
    write_lines(path / "rollouts" / "step-000001.jsonl", [group("a", "?", answer, [image], [made], space)])
    return read_groups(read_run(path), "rollouts", 1).groups[0]


@pytest.mark.parametrize(
    ("space", "written"),
    [("resized_pixels", "[5, 10, 30, 40]"), ("thousandths", "[100, 100, 600, 400]"), ("unit", "[0.1, 0.1, 0.6, 0.4]")],
)
def test_predicted_boxes_are_mapped_to_the_original(tmp_path, space, written):
    made = record(tmp_path, f"<answer>{written}</answer>", space=space)
    assert predicted_box(made, made.completions[0]) == pytest.approx((10, 20, 60, 80))
    assert overlap(made, made.completions[0]) == pytest.approx(1.0)


def test_what_has_no_box_says_so(tmp_path):
    without = record(tmp_path / "a", "nowhere")
    assert box_cell(without, without.completions[0]) == "no box"
    unknown = record(tmp_path / "b", "[1, 2, 3, 4]", space=None)
    assert box_cell(unknown, unknown.completions[0]) == "coordinates unknown"
    inverted = record(tmp_path / "c", "[30, 40, 5, 10]")
    assert box_cell(inverted, inverted.completions[0]) == "60, 80, 10, 20 (inverted)"


def test_true_boxes(tmp_path):
    assert true_box(record(tmp_path / "a", "")) == (10, 20, 60, 80)
    assert true_box(record(tmp_path / "b", "", answer="[1, 2, 3, 4]")) == (1, 2, 3, 4)
    assert true_box(record(tmp_path / "c", "", answer="[1, 2, 3, 4]", rewards={"exact": 0.0})) is None
    for number, other in enumerate([(60, 80, 10, 20), (1, 2, 3), (1, 2, 3, "4"), "cat", 7, None]):
        assert true_box(record(tmp_path / str(number), "", answer=other)) is None


def test_boxes_and_points_of_json():
    assert box_of([1, 2.5, 3, 4]) == (1, 2.5, 3, 4) and box_of([7, 8]) == (7, 8, 7, 8)
    for other in ([1, 2, 3], [1, 2, 3, None], [True, 1, 2, 3], "1234", {"x1": 1}, None, []):
        assert box_of(other) is None


def test_large_pictures_shrink_and_small_ones_stay(tmp_path):
    noise = Image.effect_noise((2000, 1000), 90).convert("RGB")
    noise.save(tmp_path / f"{SHA}.png")
    taken = Album(tmp_path).take(SHA)
    assert taken is not None and not taken.is_small
    assert taken.href.startswith("data:image/webp;base64,") and len(taken.href) < 100_000
    Image.new("RGB", (28, 28), (1, 2, 3)).save(tmp_path / f"{SHA}.png")
    taken = Album(tmp_path).take(SHA)
    assert taken is not None and taken.is_small and taken.href.startswith("data:image/webp;base64,")


def test_the_page_takes_so_many_images_and_no_more(tmp_path):
    for sha256 in (SHA, OTHER):
        Image.new("RGB", (28, 28)).save(tmp_path / f"{sha256}.png")
    album = Album(tmp_path, most_images=1)
    assert album.take(SHA) is not None
    assert album.take(OTHER) is None
    assert (album.left_out, album.missing) == (1, {})
    assert Album(tmp_path, most_bytes=10).take(SHA) is None


def test_a_picture_that_is_shown_again_is_embedded_once(tmp_path):
    Image.new("RGB", (28, 28)).save(tmp_path / f"{SHA}.png")
    album = Album(tmp_path, most_images=1)
    first, second = (str(CARDS.embedded(album.take(SHA), "a", "a", (28, 28), [])) for _ in range(2))
    assert first.count("data:image/webp") == 1 and f'id="image-{SHA}"' in first
    assert f'<use href="#image-{SHA}">' in second and "data:" not in second and album.left_out == 0


def test_what_came_back_leaves_room_for_prompts_and_for_later_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(report_pictures, "MOST_IMAGES", 1)
    for digit in "1234":
        Image.new("RGB", (28, 28)).save(tmp_path / f"{digit * 64}.png")
    album = Album(tmp_path, most_images=1)
    assert album.take("1" * 64, came_back=True) is not None
    assert album.take("2" * 64, came_back=True) is None
    assert album.take("3" * 64) is not None
    album.begin_part()
    assert album.take("4" * 64, came_back=True) is not None


def test_a_missing_or_broken_image_is_named(tmp_path):
    album = Album(tmp_path)
    made = record(tmp_path, "[1, 2, 3, 4]")
    assert "images/ has no readable file for it" in str(CARDS.prompt_pictures(album, made, []))
    assert album.missing == {SHA: f"{SHA}.webp: is not kept (rollout.record_images)"}
    (tmp_path / f"{SHA}.png").write_bytes(b"not a picture")
    assert album.take(SHA) is None
    assert album.missing == {SHA: f"{SHA}.png: is not a WebP or PNG file"}


def test_boxes_are_drawn_in_the_original_aspect_and_near_the_picture(tmp_path):
    Image.new("RGB", (50, 100)).save(tmp_path / f"{SHA}.png")
    outlines = [Outline(box=(50.0, 0.0, 1e300, -1e300), style="after", label="<after>", tag="1")]
    drawn = str(CARDS.prompt_pictures(Album(tmp_path), record(tmp_path, ""), outlines))
    assert 'viewBox="0 0 136 272"' in drawn  # 100 x 200 within 336 x 272
    assert '<rect class="edge" x="68" y="-272" width="204" height="272"/>' in drawn
    assert "&lt;after&gt;" in drawn


def test_boxes_lie_on_the_first_of_several_images(tmp_path):
    path = make_empty(tmp_path / "run")
    images = []
    for number in range(6):
        sha256 = f"{number}" * 64
        Image.new("RGB", (28, 28), (number, 0, 0)).save(path / "images" / f"{sha256}.png")
        images.append({"sha256": sha256, "path": None, "original_size": [28, 28], "processed_size": [28, 28]})
    made = group("a", "?", [1, 2, 3, 4], images, [completion("[1, 2, 3, 4]", {"iou": 1.0}, True)])
    write_lines(path / "rollouts" / "step-000001.jsonl", [made])
    record = read_groups(read_run(path), "rollouts", 1).groups[0]
    outline = Outline(box=(1.0, 2.0, 3.0, 4.0), style="truth", label="right")
    drawn = str(CARDS.prompt_pictures(Album(path / "images"), record, [outline]))
    assert drawn.count("<svg") == 4 and "and 2 more images" in drawn
    assert drawn.count("outline truth") == 1
    assert drawn.index("outline truth") < drawn.index("<figcaption>111111111111, ")


def test_a_step_shows_prompts_whose_pictures_are_kept(tmp_path):
    Image.new("RGB", (28, 28)).save(tmp_path / f"{OTHER}.webp")
    images = [
        {"sha256": sha256, "path": None, "original_size": [9, 9], "processed_size": [9, 9]} for sha256 in (SHA, OTHER)
    ]
    spread = [completion("a", {"exact": reward}, None) for reward in (0.0, 1.0)]
    records = [group(str(n), "?", None, [images[n]] if n < 2 else [], spread, None) for n in range(3)]
    file = GroupFile(step=1, groups=tuple(map(GroupRecord.from_json, records)), unreadable=0)
    assert sorted(card.group.id for card in shown_step(file, Album(tmp_path)).cards) == ["1", "2"]
    (tmp_path / f"{OTHER}.webp").unlink()
    assert [card.group.id for card in shown_step(file, Album(tmp_path)).cards] == ["2"]
    alone = GroupFile(step=1, groups=file.groups[:1], unreadable=0)
    assert [card.group.id for card in shown_step(alone, Album(tmp_path)).cards] == ["0"]

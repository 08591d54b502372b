"""Rewards that look at the pictures of their prompt, in the forms of tiercel, TRL and VLM-R1."""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.rewards.samples import group, reward, sample
from tests.tiny_models import noise_image
from tiercel.config.schema import Reliability
from tiercel.data.formats.registry import rows_of
from tiercel.data.media.images import decode
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.reward_types import SampleImage
from tiercel.rewards.runtime.pictures import PictureFiles
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.types import ImageRoots, ImageSource, Message, Row, VideoSource

pytestmark = pytest.mark.usefixtures("no_child_left")

SIDEWAYS = 6  # EXIF orientation of a picture whose rows are columns


def encoded(format: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    noise_image(40, 30, 1).save(stream, format, **options)
    return stream.getvalue()


def sideways() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = SIDEWAYS
    return encoded("JPEG", exif=exif)


def shown(source: ImageSource, root: Path, count: int = 2, **columns):
    """A group whose prompt shows the picture of `source`."""
    whole = group(*["x"] * count, columns=columns)
    row = replace(whole.prompt.row, images=(source,), image_roots=ImageRoots(base=str(root)))
    return replace(whole, prompt=replace(whole.prompt, row=row))


def values(call: str, *groups) -> list[float | None]:
    with Scorer([reward(call=call)], Reliability(), "resized_pixels") as scorer:
        scored = scorer.score(groups)
    found = [completion.rewards["score"] for each in scored for completion in each.completions]
    assert [value.failure for value in found] == [None] * len(found)
    return [value.value for value in found]


SUM = "def score(sample): return sum(sample.images[0].open().tobytes())"


@pytest.mark.parametrize("data", [encoded(), encoded("WEBP", lossless=True), sideways()])
@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_reward_opens_the_picture_that_the_model_saw(tmp_path, reward_file, data, is_embedded):
    (tmp_path / "img").mkdir()
    (tmp_path / "img/a.png").write_bytes(data)
    source = ImageSource(data=data) if is_embedded else ImageSource(path="a.png")
    expected = sum(decode(source, ImageRoots(base=str(tmp_path / "img")), 10**6).tobytes())
    assert values(reward_file(SUM), shown(source, tmp_path / "img")) == [expected] * 2


def test_an_upright_size(tmp_path, reward_file):
    call = reward_file("def score(sample):\n    w, h = sample.images[0].open().size\n    return 1000 * w + h")
    assert values(call, shown(ImageSource(data=sideways()), tmp_path, 1)) == [30_040]


def test_files_of_embedded_pictures_are_read_only_and_go(tmp_path):
    prompt = shown(ImageSource(data=encoded()), tmp_path).prompt
    with PictureFiles() as pictures:
        (file,) = pictures.of(prompt)
        assert pictures.of(prompt) == (file,)
        assert os.stat(file).st_mode & 0o777 == 0o444
        assert Path(file).read_bytes() == encoded()
    assert not Path(file).parent.exists()


def test_what_has_no_file_says_so(tmp_path):
    prompt = shown(ImageSource(path="gone.png"), tmp_path).prompt
    added = replace(prompt, images=prompt.images * 2)
    film = replace(prompt.row, images=(), videos=(VideoSource(path="a.mp4"),))
    turn = Message(role="user", content="<video>What?")
    with PictureFiles() as pictures:
        assert pictures.of(added) == (None, None)
        assert pictures.of(replace(prompt, row=replace(film, messages=(turn,)))) == (None,)
    with pytest.raises(FileNotFoundError, match=r"a\.png has no file"):
        sample().images[0].open()
    with pytest.raises(FileNotFoundError, match="this picture has no file"):
        SampleImage(path=None, original_size=(1, 1), processed_size=(1, 1)).open()


# TRL's and VLM-R1's forms

BY_NAME = {
    "images": "def score(completions, images, **kwargs): return [float(each[0].width) for each in images]",
    "all images": "def score(completions, images): return [sum(i.height + 10 for i in each) for each in images]",
    "image_path": """
        from PIL import Image

        def score(completions, solution, **kwargs):
            return [float(Image.open(paths[0]).width) for paths in kwargs["image_path"]]
        """,
    "image_grid_thw": """
        def score(completions, **kwargs):
            return [float(int(grid[1] * 14) + 26) for grid in kwargs["image_grid_thw"]]
        """,
    "problem": "def score(completions, problem): return [len(each) + 25.0 for each in problem]",
}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("is_embedded", [True, False])
def test_functions_get_pictures_by_name(tmp_path, reward_file, name, is_embedded):
    (tmp_path / "a.png").write_bytes(encoded())
    source = ImageSource(data=encoded()) if is_embedded else ImageSource(path="a.png")
    assert values(reward_file(BY_NAME[name]), shown(source, tmp_path)) == [40.0, 40.0]


def test_a_column_of_the_row_goes_before_what_is_made(tmp_path, reward_file):
    call = reward_file("def score(completions, problem): return [float(each) for each in problem]")
    assert values(call, shown(ImageSource(data=encoded()), tmp_path, problem="7")) == [7.0, 7.0]


TAGGED = """
    import json, re

    def score(completions, solution, problem, accu_reward_method, answer):
        found = [re.findall(r"<answer>(.*?)</answer>", each)[-1].strip() for each in solution]
        assert set(accu_reward_method) == {"default"}
        return [10 * len(text) + len(asked) for text, asked in zip(found, problem)]
    """


def vlm_r1(answer: object, **columns) -> Row:
    turns = [{"from": "human", "value": "<image>Where?"}, {"from": "gpt", "value": answer}]
    reading = Reading(file="f.jsonl", purpose="grpo", image_roots=ImageRoots(), image_size=lambda image: (9, 9))
    record = {"image": "a.png", "conversations": turns, **columns}
    (row,) = rows_of(Record(line=1, value=record), "vlm_r1", reading)
    assert isinstance(row, Row)
    return row


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([10, 10, 60, 60], "[10, 10, 60, 60]"),
        (3.5, "3.5"),
        ("<answer> two cups </answer>", "two cups"),
        ("two", "two"),
    ],
)
def test_the_answer_of_a_row_of_vlm_r1_comes_in_its_form(tmp_path, reward_file, answer, text):
    row = vlm_r1(answer)
    assert (row.named["solution"], row.named["problem"]) == (f"<answer> {text} </answer>", "Where?")
    assert row.columns == {}
    whole = group("x")
    asked = replace(whole, prompt=replace(whole.prompt, row=row))
    assert values(reward_file(TAGGED), asked) == [10 * len(text) + len("Where?")]


def test_the_columns_of_a_row_of_vlm_r1_are_left_as_they_are(reward_file):
    whole = group("x")
    row = vlm_r1([1, 2, 3, 4], solution="<answer> own </answer>")
    asked = replace(whole, prompt=replace(whole.prompt, row=row))
    assert values(reward_file(TAGGED), asked) == [36.0]


def test_rows_of_both_kinds_in_one_batch(reward_file):
    call = reward_file("def score(completions, solution): return [float(len(str(each))) for each in solution]")
    whole = group("x", answer=7)
    asked = replace(whole, prompt=replace(whole.prompt, row=vlm_r1(3.5)))
    assert values(call, whole, asked) == [1.0, len("<answer> 3.5 </answer>")]


def test_rows_of_other_formats_give_the_bare_answer(reward_file):
    call = reward_file("def score(completions, solution): return [float(each) for each in solution]")
    assert values(call, group("x", "y", answer=7)) == [7.0, 7.0]

"""The demo of a tool: its scenes, its start, its recipe."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.scenes import SIDE
from examples.zoom.demo import START, summary
from examples.zoom.reward import zoomed_right
from examples.zoom.scenes import (
    CENTRES,
    DIGIT,
    LARGE_SIDE,
    QUESTION,
    RED,
    REDUCTION,
    draw_large_scene,
    region,
    write_questions,
    zoomed,
)
from tests.rewards.samples import sample
from tests.training.test_loops import run_grpo
from tiercel.config import load_recipe
from tiercel.config.schema import Model, Reliability
from tiercel.demo.handwriting import load_digit_images
from tiercel.environments.tools import load_toolbox
from tiercel.models.chat import encode_answer, require_joining
from tiercel.models.families.loading import load_family
from tiercel.models.rendering import render
from tiercel.reward_types import PolicyTurn, ToolCall
from tiercel.runs.directory import read_metrics
from tiercel.types import Message
from tools.demo.zoom_lessons import TOOLS, write_lessons

RECIPE = Path(__file__).parents[2] / "recipes/zoom-demo.yaml"


@pytest.fixture(scope="module")
def family():
    family = load_family(Model(path=str(START), max_pixels=SIDE * SIDE))
    family.tools = load_toolbox(None, ["zoom"], Reliability()).schemas
    return family


@pytest.fixture(scope="module")
def scene():
    images, labels = load_digit_images()
    return draw_large_scene(images, labels, np.random.default_rng(0))


def test_each_place_has_a_digit_inside_the_region_that_shows_it(scene):
    assert len(scene.boxes) == len(scene.digits) == len(CENTRES) == 9
    for place, box in enumerate(scene.boxes):
        left, top, right, bottom = (v * REDUCTION for v in region(place))
        assert left <= box[0] and top <= box[1] and box[2] <= right and box[3] <= bottom
        assert (box[2] - box[0], box[3] - box[1]) == (DIGIT, DIGIT)


def test_the_model_sees_the_ring_and_a_pixel_or_two_of_a_digit(scene, family):
    seen = family.encode_image(scene.image)
    assert seen.plan.processed_size == (SIDE, SIDE)
    assert DIGIT / REDUCTION < 1.2
    pixels = seen.views[0].numpy().astype(int)
    red = np.argwhere((pixels[..., 0] > 180) & (pixels[..., 1] < 90) & (pixels[..., 2] < 90))
    centre = np.array(CENTRES[scene.marked]) / REDUCTION
    assert len(red) > 50
    assert np.abs(red[:, ::-1].mean(0) - centre).max() < 1


def test_the_tool_shows_a_digit_as_large_as_the_model_can_read(scene):
    shown = np.asarray(zoomed(scene.image, scene.marked))
    assert shown.shape == (SIDE, SIDE, 3)
    assert (shown != RED).any(-1).all()  # the ring is outside
    whole = scene.image.resize((SIDE, SIDE))
    x, y = (v // REDUCTION for v in CENTRES[scene.marked])
    assert np.asarray(whole.crop((x - 1, y - 1, x + 1, y + 1)).resize((SIDE, SIDE))).std() < shown.std()


def test_held_out_scenes_show_other_digits(tmp_path):
    write_questions(tmp_path, "a", 2, 5, use_held_out=False)
    write_questions(tmp_path, "b", 2, 5, use_held_out=True)
    first, second = (json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0]) for name in "ab")
    assert first["messages"] == second["messages"] == [{"role": "user", "content": QUESTION}]
    assert Image.open(tmp_path / first["images"][0]).size == (LARGE_SIDE, LARGE_SIDE)
    assert first["digit_box"] == second["digit_box"]
    shown = [np.asarray(Image.open(tmp_path / row["images"][0]).crop(row["digit_box"])) for row in (first, second)]
    assert not np.array_equal(*shown)


def test_lessons_are_written_as_the_template_writes_trajectories(tmp_path, family):
    write_lessons(tmp_path, "lessons", 1, 5, use_held_out=False)
    rows = [json.loads(row) for row in (tmp_path / "lessons.jsonl").read_text().splitlines()]
    *reads, at_once, tooled = rows
    assert len(reads) == len(CENTRES)
    assert at_once["messages"][0] == {"role": "user", "content": QUESTION}
    lesson = [Message(role=turn["role"], content=turn["content"]) for turn in tooled["messages"]]
    read = next(row for row in reads if row["images"] == tooled["images"][1:])
    assert tooled["messages"][3:] == read["messages"]
    without = load_family(Model(path=str(START)))
    assert render(without, lesson[:2], True) == render(family, [lesson[1]], True)
    picture = family.encode_image(Image.open(tmp_path / tooled["images"][1]))
    observed = encode_answer(family, [Message(role="tool", content="image 2\n<image>", tool="zoom")], [picture])
    taught = encode_answer(family, [lesson[3]], [picture])
    assert observed.token_ids_L.tolist() == taught.token_ids_L.tolist()
    assert f"<|im_start|>system\n{TOOLS}<|im_end|>" in render(family, [lesson[1]], True)
    require_joining(family, "tool")


def looks(*calls: ToolCall):
    turns = tuple(PolicyTurn(text="", token_count=1, calls=(call,)) for call in calls)
    asked = sample(
        "7", columns={"digit_box": [129, 127, 137, 135]}, original_size=(784, 784), processed_size=(112, 112)
    )
    return replace(asked, turns=turns)


def zoom(*box: int, **more):
    return ToolCall(name="zoom", arguments={"box": list(box), **more})


@pytest.mark.parametrize(
    ("calls", "value"),
    (
        ((), 0.0),
        ((zoom(18, 18, 20, 20),), 1.0),  # 126 to 140 in the original
        ((zoom(55, 18, 57, 20),), 0.0),
        ((zoom(55, 18, 57, 20), zoom(18, 18, 20, 20)), 1.0),
        ((zoom(19, 18, 20, 20),), 0.0),  # cuts the digit
        ((zoom(0, 0, 112, 112),), 0.0),  # shows all digits
        ((zoom(18, 18, 20, 20, image=2),), 0.0),
        ((replace(zoom(18, 18, 20, 20), failure="no"),), 0.0),
        ((ToolCall(name="look", arguments={}, is_known=False),), 0.0),
    ),
)
def test_a_zoom_is_right_where_it_shows_the_whole_digit_and_no_other(calls, value):
    assert zoomed_right(looks(*calls)) == value


def test_two_steps_with_the_tool_and_without(tmp_path):
    write_questions(tmp_path, "rows", 4, 5, use_held_out=False)
    changes = {
        "model.path": str(START),
        "data.train": str(tmp_path / "rows.jsonl"),
        "data.eval": str(tmp_path / "rows.jsonl"),
        "data.workers": 0,
        "rewards": [{"name": "exact"}, {"call": f"{START.parent / 'reward.py'}:zoomed_right", "weight": 0}],
        "rollout.group_size": 4,
        "optim.prompts_per_step": 2,
        "optim.warmup_steps": 0,
        "train.steps": 2,
        "train.save_every": 2,
    }
    for name, tools in (("with", ["zoom"]), ("without", [])):
        own = {**changes, "rollout.tools": tools, "output": str(tmp_path / name)}
        overrides = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        metrics = read_metrics(run_grpo(load_recipe("grpo", RECIPE, overrides)))
        assert [row["step"] for row in metrics] == [0, 1, 2]
        assert ("tools/zoom/calls" in metrics[1]) == bool(tools)
        assert all("eval/accuracy" in metrics[step] for step in (0, 2))
        assert summary(name, tmp_path / name).startswith(f"{name}:")
    assert metrics[2]["eval/reward/zoomed_right/mean"] == 0.0

"""Event files, read back by TensorBoard's own accumulator."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.trackers.runs import PICTURES_AT, grounding, numbers, track

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def accumulated(run: Path) -> EventAccumulator:
    events = EventAccumulator(
        str(run / "trackers/tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    events.Reload()
    return events


def rows_of(events: EventAccumulator) -> dict[int, dict[str, float]]:
    """Metrics by step; a step that a metric has twice is a failure."""
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            row = rows.setdefault(event.step, {})
            assert tag not in row, (tag, event.step)
            row[tag] = event.value
    return rows


def test_the_numbers_are_those_of_metrics_jsonl(tmp_path):
    run, rows = grounding(tmp_path / "run")
    assert track(run, ["tensorboard"], rows) == []
    tracked = rows_of(accumulated(run))
    assert sorted(tracked) == [0, 1, 2, 3, 4]
    for row in rows:
        assert tracked[row["step"]] == pytest.approx(numbers(row), rel=1e-6)  # TensorBoard's are float32


def test_pictures_come_with_evaluations(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["tensorboard"], rows)
    events = accumulated(run)
    assert sorted(events.Tags()["images"]) == [f"rollouts/{number}" for number in range(4)]
    shown = events.Images("rollouts/0")
    assert [event.step for event in shown] == list(PICTURES_AT)
    picture = Image.open(io.BytesIO(shown[0].encoded_image_string))
    assert picture.size == (shown[0].width, shown[0].height) and max(picture.size) == 512
    (caption, _) = events.Tensors("rollouts/0/caption")
    text = caption.tensor_proto.string_val[0].decode()
    assert text.startswith("prompt: <image>Where is it?") and "completion: " in text and "reward: " in text


def test_a_resumed_run_has_no_step_twice(tmp_path):
    run, rows = grounding(tmp_path / "run")
    wrong = [{**row, "loss": 99.0} for row in rows[3:]]
    track(run, ["tensorboard"], [*rows[:3], *wrong])  # killed past its checkpoint of step 2
    track(run, ["tensorboard"], rows[3:], kept=rows[:3])
    tracked = rows_of(accumulated(run))
    assert sorted(tracked) == [0, 1, 2, 3, 4]
    assert [tracked[step]["loss"] for step in range(1, 5)] == pytest.approx([row["loss"] for row in rows[1:]])


def test_a_run_that_starts_anew_forgets_what_was_cut_off(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["tensorboard"], [{**row, "loss": 99.0} for row in rows])
    track(run, ["tensorboard"], rows[:2])
    tracked = rows_of(accumulated(run))
    assert sorted(tracked) == [0, 1] and tracked[1]["loss"] == pytest.approx(rows[1]["loss"])


def test_a_tracker_that_joins_later_gets_the_rows_so_far(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["tensorboard"], rows[3:], kept=rows[:3])
    assert sorted(rows_of(accumulated(run))) == [0, 1, 2, 3, 4]


def test_the_recipe_is_there_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefghijkl")
    run, rows = grounding(tmp_path / "run")
    track(run, ["tensorboard"], rows[:1], model={"path": "hub/abcdefghijkl"})
    (event,) = accumulated(run).Tensors("recipe")
    text = event.tensor_proto.string_val[0].decode()
    assert "eval_every: 2" in text and "[redacted MY_API_KEY]" in text and "abcdefghijkl" not in text

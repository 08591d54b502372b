"""The demo's pairs: what is written for a scene, and what is reported of the runs."""

import json

import numpy as np
import pytest

from examples.pairs import demo as pairs
from examples.pairs.demo import PAIRS_OF_A_SCENE, two_boxes, write_pairs
from tiercel.errors import TrainingError
from tiercel.rewards.boxes import iou


def test_the_chosen_box_is_nearer_to_the_true_one():
    generator = np.random.default_rng(0)
    for _ in range(50):
        better, worse = two_boxes((20, 28, 60, 72), generator)
        assert iou(better, (20, 28, 60, 72)) > iou(worse, (20, 28, 60, 72)) + 0.1


def test_a_scene_gives_pairs_and_a_label(tmp_path):
    asked = {"role": "user", "content": "<image>Where is the seven?"}
    rows = [
        {"id": str(n), "images": ["a.png"], "messages": [asked, {"role": "assistant", "content": "[1]"}], "answer": box}
        for n, box in enumerate(([8, 8, 48, 48], [40, 40, 80, 88]))
    ]
    (tmp_path / "practice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_pairs(tmp_path, "practice", 0)
    made, labels = (
        [json.loads(line) for line in (tmp_path / f"{kind}-practice.jsonl").read_text().splitlines()]
        for kind in ("pairs", "labels")
    )
    assert [row["label"] for row in labels] == [True, False]
    assert len(made) == PAIRS_OF_A_SCENE * len(rows) and len({pair["id"] for pair in made}) == len(made)
    for number, pair in enumerate(made):
        row, label = rows[number // PAIRS_OF_A_SCENE], labels[number // PAIRS_OF_A_SCENE]
        chosen, rejected = json.loads(pair["messages"][1]["content"]), json.loads(pair["rejected"])
        assert iou(tuple(chosen), tuple(row["answer"])) > iou(tuple(rejected), tuple(row["answer"]))
        assert pair["messages"][0] == asked and pair["images"] == ["a.png"]
        if number % PAIRS_OF_A_SCENE == PAIRS_OF_A_SCENE - 1:  # the last one of a scene
            assert json.loads(label["messages"][1]["content"]) == (chosen if label["label"] else rejected)


def test_the_summary_says_when_the_student_was_near_its_teacher(tmp_path, monkeypatch):
    evaluations = {
        "PAIRS": ((0, 0.5), (100, 0.9)),
        "TEACHER": ((0, 0.4), (250, 1.0)),
        "STUDENT": ((0, 0.4), (50, 0.95)),
        "RANKER": ((0, 0.5), (150, 0.95)),
        "RANKED": ((0, 0.4), (100, 0.8)),
    }
    for name, rows in evaluations.items():
        run = tmp_path / name
        run.mkdir()
        lines = [json.dumps({"step": step, "eval/accuracy": accuracy}) + "\n" for step, accuracy in rows]
        (run / "metrics.jsonl").write_text("".join(lines))
        monkeypatch.setattr(pairs, name, run)
    said = pairs.summary().splitlines()
    assert said[0] == "pairs:    0.500 -> 0.900 of the held-out pairs told apart"
    assert said[1] == "teacher:  0.400 -> 1.000 held-out accuracy in 250 steps of GRPO"
    assert said[2] == "student:  0.400 -> 0.950 in 50 steps; 0.9 of the teacher's by step 50"
    assert said[3] == "ranker:   0.500 -> 0.950 of the held-out pairs told apart"
    assert said[4] == "by it:    0.400 -> 0.800 held-out accuracy in 100 steps of GRPO"
    (tmp_path / "STUDENT/metrics.jsonl").write_text(json.dumps({"step": 0, "eval/accuracy": 0.4}) + "\n")
    with pytest.raises(TrainingError, match="has no evaluations from before"):
        pairs.summary()

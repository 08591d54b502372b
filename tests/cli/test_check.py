"""What `tiercel check` says about rows that it does not reject."""

import json
import re
from collections import Counter

import pytest

from tests.tiny_models import noise_image
from tests.training.test_loops import grpo_recipe, sft_recipe
from tiercel.cli.check import token_table
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.data.scan import ScanReport
from tiercel.errors import EXIT_DONE


@pytest.mark.parametrize(
    ("family", "answer", "size", "is_told"),
    [
        ("qwen2_5_vl", "[10, 20, 30, 40]", (57, 60), True),
        ("qwen2_5_vl", '{"bbox_2d": [10, 20, 30, 40]}', (57, 60), True),
        ("qwen2_5_vl", "[10, 20, 30, 40]", (56, 56), False),  # not resized
        ("qwen2_5_vl", "A cup.", (57, 60), False),
        ("qwen2_5_vl", "<bbox>", (57, 60), False),
        ("qwen3_vl", "[10, 20, 30, 40]", (57, 60), False),
        ("qwen3_vl", "[10, 20, 30, 1040]", (57, 60), True),
        ("qwen2_5_vl", '{"point_2d": [10, 20]}', (57, 60), True),
        ("qwen2_5_vl", "pyautogui.click(x=10, y=20)", (57, 60), True),
        ("qwen2_5_vl", "<|box_start|>(10,20)<|box_end|>", (57, 60), True),
        ("qwen2_5_vl", "The set is (10, 20).", (57, 60), False),
        ("qwen3_vl", '{"action": "click", "coordinate": [10, 1020]}', (57, 60), True),
        ("qwen3_vl", '{"action": "click", "coordinate": [10, 20]}', (57, 60), False),
    ],
)
def test_boxes_as_numbers_in_an_answer_are_told(tiny_checkpoints, tmp_path, capsys, family, answer, size, is_told):
    """Their numbers are learnt as they are, although Qwen2.5-VL writes pixels of the resized picture."""
    noise_image(*size, seed=0).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": answer}]
    row = {"messages": turns, "images": ["a.png"], **({"boxes": [[1, 2, 30, 40]]} if answer == "<bbox>" else {})}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = sft_recipe(tiny_checkpoints[family], tmp_path / "rows.jsonl", tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE
    told = re.search("note on 1 row: answers with (boxes|points) as numbers are learnt", capsys.readouterr().out)
    assert (told is not None) == is_told


def notes_of(tiny_checkpoints, tmp_path, capsys, family, rows, size=(57, 60)):
    noise_image(*size, seed=0).save(tmp_path / "a.png")
    lines = [json.dumps({"images": ["a.png"], **row}) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    recipe = sft_recipe(tiny_checkpoints[family], tmp_path / "rows.jsonl", tmp_path / "run", data={"eval": None})
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE
    return re.findall(r"note on (\d+) rows?: (.*)", " ".join(capsys.readouterr().out.split("\n")).replace("  ", "\n"))


def turns(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("family", "answer", "told"),
    [
        ("qwen3_vl", "[0.04, 0.35, 0.27, 0.43]", "answers have boxes as fractions"),
        ("qwen2_5_vl", "[0.04, 0.35, 0.27, 0.43]", "answers have boxes as fractions"),
        ("internvl", '{"bbox": [0, 0, 0.5, 1]}', "answers have boxes as fractions"),
        ("ovis2", "[0.04, 0.35, 0.27, 0.43]", None),  # which writes fractions itself
        ("qwen3_vl", "[0, 0, 1, 1]", None),
    ],
)
def test_boxes_as_fractions_in_an_answer_are_told(tiny_checkpoints, tmp_path, capsys, family, answer, told):
    """As in LLaVA's sets, which InternVL 211 trained on: the model writes thousandths."""
    notes = notes_of(tiny_checkpoints, tmp_path, capsys, family, [turns("<image>Where?", answer)])
    assert [note.startswith(told) for _, note in notes] == ([] if told is None else [True])


@pytest.mark.parametrize(
    ("family", "question", "is_told"),
    [
        ("qwen3_vl", "Describe the region [0.04, 0.35, 0.27, 0.43].", True),
        ("qwen3_vl", "What is in the box [10, 20, 30, 1040]?", True),
        ("qwen2_5_vl", "What is in the box [10, 20, 30, 40]?", True),
        ("qwen3_vl", "What is in the box [10, 20, 30, 40]?", False),
        ("qwen2_5_vl", "What is the mean of [10, 20, 30, 40]?", False),
        ("qwen2_5_vl", "Give its box as [x1, y1, x2, y2].", False),
    ],
)
def test_boxes_as_numbers_in_a_question_are_told(tiny_checkpoints, tmp_path, capsys, family, question, is_told):
    notes = notes_of(tiny_checkpoints, tmp_path, capsys, family, [turns(f"<image>{question}", "A cup.")])
    assert [note.startswith("questions have boxes as numbers") for _, note in notes] == [True] * is_told


@pytest.mark.parametrize(("family", "is_told"), [("internvl", True), ("llava_onevision", True), ("qwen3_vl", False)])
def test_tokens_of_qwens_boxes_are_told_for_other_models(tiny_checkpoints, tmp_path, capsys, family, is_told):
    """ms-swift 4298: InternVL3's tokenizer has these tokens, which nobody trained, and answers were garbled."""
    answer = "<|object_ref_start|>a cup<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>"
    notes = notes_of(tiny_checkpoints, tmp_path, capsys, family, [turns("<image>Where?", answer)])
    found = [note for _, note in notes if note.startswith("answers have <|object_ref_start|>, a token of")]
    assert len(found) == is_told


@pytest.mark.parametrize(("count", "beyond", "is_told"), [(12, False, True), (11, False, False), (12, True, False)])
def test_boxes_that_may_be_pixels_are_told_if_all_of_many_may(
    tiny_checkpoints, tmp_path, capsys, count, beyond, is_told
):
    """ms-swift 6167: rows with pixels for Qwen2.5-VL are learnt as thousandths by Qwen3-VL."""
    rows = [turns("<image>Where?", f"[10, 20, 30, {40 + number}]") for number in range(count)]
    rows += [turns("<image>Where?", "[10, 20, 30, 640]")] * beyond
    notes = notes_of(tiny_checkpoints, tmp_path, capsys, "qwen3_vl", rows)
    assert [number for number, note in notes if "all lie within their small pictures" in note] == ["12"] * is_told


@pytest.mark.parametrize(
    ("columns", "is_told"),
    [
        ({"width": 57, "height": 60}, False),
        ({"width": 60, "height": 57}, True),  # drawn before the picture was turned
        ({"width": 570, "height": 600}, True),
        ({"width": 570.0, "height": 600.0}, True),  # as a column of Parquet with missing values has them
        ({"img_width": 570, "img_height": 600}, True),
        ({"width": 4.5, "height": 2.0}, False),
        ({"width": 570}, False),
        ({"width": 570, "height": 600, "answer": "a cup", "boxes": None}, False),
    ],
)
def test_boxes_on_a_picture_of_another_size_are_told(tiny_checkpoints, tmp_path, capsys, columns, is_told):
    noise_image(57, 60, seed=0).save(tmp_path / "a.png")
    asked = [{"role": "user", "content": "<image>Where?"}]
    row = {"messages": asked, "images": ["a.png"], "answer": [10, 20, 30, 40], **columns}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    output, rewards = tmp_path / "run", [{"name": "format"}]
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", output, rewards=rewards)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE
    assert ("note on 1 row: the width and height beside the boxes" in capsys.readouterr().out) == is_told


def test_a_template_that_writes_the_date_is_told(tiny_checkpoints, tmp_path, capsys):
    """As Llama 3.2's does, unless date_string is given."""
    dated = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}"
        "{% for turn in messages %}<|im_start|>{{ turn.role }} {{ date_string }}\n{% for part in turn.content %}"
        "{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ date_string }}\n{% endif %}"
    )
    (tmp_path / "dated.jinja").write_text(dated)
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cup."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    template = {"template": str(tmp_path / "dated.jinja")}
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path / "run", data=template)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE
    assert "may write today's date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("train", "rows"), [({"steps": None, "epochs": 1}, "11 of 11, 100.00%"), ({"steps": 2}, "16 of only 11")]
)
def test_a_step_has_no_more_rows_than_the_epochs_leave(tmp_path, train, rows):
    recipe = sft_recipe(
        tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", train=train, optim={"prompts_per_step": 16}
    )
    report = ScanReport(rows_by_length=Counter({1: 11}))
    assert rows in next(iter(token_table(recipe, report, 11).columns[1].cells))


def test_progress_is_written_into_a_file_line_by_line(tiny_checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tiercel.cli.check.SPOKEN_SECONDS", -1.0)
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "3"}]
    (tmp_path / "rows.jsonl").write_text(300 * (json.dumps({"messages": turns}) + "\n"))
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE
    written = "".join(capsys.readouterr().out.splitlines())  # lines are wrapped at the width of the console
    assert [count for count in ("256 of 300 rows", "300 of 300 rows") if count not in written] == []


@pytest.mark.parametrize("fault", ("missing", "cut short", "too long"))
def test_a_first_row_that_is_rejected_does_not_end_the_check(tiny_checkpoints, tmp_path, fault):
    """Rewards are tried on the first row that can be used."""
    for name in ("a.png", "cut.png"):
        noise_image(56, 56, seed=0).save(tmp_path / name)
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:900])
    good = {"messages": [{"role": "user", "content": "<image>Where?"}], "images": ["a.png"], "answer": "[1, 20]"}
    bad = {
        "missing": {**good, "images": ["none.png"]},
        "cut short": {**good, "images": ["cut.png"]},
        "too long": {**good, "messages": [{"role": "user", "content": "<image>" + "seven " * 500}]},
    }[fault]
    rows = [bad, *[good] * 4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"rewards": [{"name": "exact"}], "data": {"max_bad_fraction": 0.5, "eval": None}}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path / "run", **changes)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_DONE

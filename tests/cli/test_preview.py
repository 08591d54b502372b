"""`tiercel data preview` and `tiercel check --fix-report` through the real command line."""

import json
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import MIXED_PICTURES, make_row, mixed_rows
from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.cli.preview import pieces
from tiercel.config import recipe_to_yaml
from tiercel.config.schema import Model
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import encode_prompt
from tiercel.types import PixelLimits, VideoSource
from tiercel.web.report.preview import PreviewRow, render


def recipe_file(tmp_path, checkpoint, make=grpo_recipe, **changes):
    recipe = make(checkpoint, write_rows(tmp_path), tmp_path / "run", **changes)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    return str(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl"))
def test_the_page_shows_prompts_pictures_and_boxes(tiny_checkpoints, tmp_path, name, capsys):
    recipe = recipe_file(tmp_path, tiny_checkpoints[name], data={"shuffle": False})
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    hostile = {**json.loads(lines[1]), "answer": [4, 5, 20, 30]}
    hostile["messages"][0]["content"] = "<image>Where is <b>it</b>?"
    bad = {**json.loads(lines[2]), "images": ["gone.png", "gone.png"]}
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], json.dumps(hostile), json.dumps(bad), *lines[3:]]))
    page = tmp_path / "page.html"
    assert main(["data", "preview", recipe, "--rows", "3", "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: 3 rows\n"
    text = page.read_text()
    assert "&lt;b&gt;it&lt;/b&gt;" in text and "<b>it" not in text
    assert text.count("data:image/webp;base64,") == 1 and 'class="outline truth"' in text
    assert "[image: 4 tokens]" in text and "0: row-0" in text
    assert "rejected: gone.png: there is no such file" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text


def test_sft_marks_what_is_learnt(tiny_checkpoints, tmp_path):
    recipe = recipe_file(tmp_path, tiny_checkpoints["qwen3_vl"], make=sft_recipe)
    page = tmp_path / "page.html"
    assert main(["data", "preview", recipe, "--rows", "12", "--output", str(page)]) == 0
    assert page.read_text().count('<mark class="learnt">[') == 12
    assert "20]&lt;|im_end|&gt;</mark>" in page.read_text()


def test_images_side_by_side_are_pieces_of_their_own(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    row, images = mixed_rows(family)[2]
    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
    found = pieces(family, prompt.token_ids_P, torch.zeros(len(prompt.token_ids_P), dtype=torch.bool), images)
    shown = [piece.text for piece in found if piece.kind == "image"]
    assert shown == [f"[image: {image.plan.token_count} tokens]" for image in images] and len(MIXED_PICTURES) == 3


def test_tools_of_the_policy_are_in_the_prompt_as_the_model_sees_it(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    listed = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + family.checkpoint.chat_template
    family.checkpoint = replace(family.checkpoint, chat_template=listed)
    described = {"name": "zoom", "description": "Look <b>closer</b>.", "parameters": {"type": "object"}}
    family.tools = ({"type": "function", "function": described},)
    row, images = mixed_rows(family)[2]
    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=800)
    found = pieces(family, prompt.token_ids_P, torch.zeros(len(prompt.token_ids_P), dtype=torch.bool), images)
    shown = PreviewRow(
        index=0, id="a", place="rows:1", pieces=found, pictures=(), token_count=len(prompt.token_ids_P), answer=""
    )
    page = render([shown], "rows", [])
    assert "&quot;name&quot;: &quot;zoom&quot;" in page and "Look &lt;b&gt;closer&lt;/b&gt;." in page
    assert "<b>closer" not in page and page.count("[image: ") == len(images)


def test_the_fix_report_is_written_though_the_check_fails(tiny_checkpoints, tmp_path, capsys):
    recipe = recipe_file(tmp_path, tiny_checkpoints["qwen2_vl"])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("nonsense\n")
        file.write(json.dumps({"messages": [{"role": "user", "content": "?"}], "images": ["gone.png"]}) + "\n")
    report = tmp_path / "bad.jsonl"
    assert main(["check", recipe, "--fix-report", "--report-file", str(report)]) == 2
    said, error = capsys.readouterr()
    assert "data.max_bad_fraction" in error and "gone.png" not in error  # reported before, once for each file
    assert said.count("rejected ") == 5 and said.index("rows.jsonl:13") < said.index("rows.jsonl:14")
    found = [json.loads(line) for line in report.read_text().splitlines()]
    of_train = found[: len(found) // 2]  # the same file is data.eval
    assert [(each["line"], each["field"]) for each in of_train] == [(13, "row"), (14, "images")]
    assert of_train[0]["row"] == "nonsense" and of_train[1]["row"]["images"] == ["gone.png"]


def test_layers_of_a_video_are_pieces_with_their_times_between(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen3_vl"])))
    row = replace(make_row("row", "<video>Where?", 0), videos=(VideoSource(path="v.mp4"),))
    plan = family.plan_video((84, 56), 4, 1.0, PixelLimits(least=1, most=84 * 56))
    images = [family.encode_video([MIXED_PICTURES[0]] * 4, plan)]
    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
    found = pieces(family, prompt.token_ids_P, torch.zeros(len(prompt.token_ids_P), dtype=torch.bool), images)
    text = "".join(piece.text for piece in found)
    layer = "<|vision_start|>[video: 6 tokens]<|vision_end|>"
    assert f"<0.5 seconds>{layer}<2.5 seconds>{layer}Where?" in text

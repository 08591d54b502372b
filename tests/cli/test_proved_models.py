"""Every command with models that have no family of their own, through the real command line."""

import json
from html import escape
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.generic_models import GENERIC, has_processor, save_generic_checkpoint
from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml


def text_rows(directory: Path) -> Path:
    """Leave the rows without a picture."""
    path = write_rows(directory)
    lines = [line for line in path.read_text().splitlines() if not json.loads(line)["images"]]
    path.write_text("\n".join(lines) + "\n")
    return path


def needing(name: str, package: str):
    """A model whose processor needs a package that `make test-generic` installs."""
    has_all = find_spec(package) is not None or (package == "torchvision" and has_processor(name))
    return pytest.param(name, marks=pytest.mark.skipif(not has_all, reason=f"its processor needs {package}"))


MODELS = (
    "llama",
    "llava",
    needing("idefics3", "torchvision"),
    needing("glm46v", "torchvision"),
    needing("mistral3", "torchvision"),
    needing("pixtral", "torchvision"),
    needing("smolvlm", "num2words"),
)


@pytest.fixture(scope="module", params=MODELS)
def place(request, tmp_path_factory) -> Path:
    """A directory with recipes of one architecture, and its GRPO run."""
    root = tmp_path_factory.mktemp(request.param)
    tiny = GENERIC[request.param]
    checkpoint = save_generic_checkpoint(tiny, root / "model")
    rows = text_rows(root) if tiny.processor is None else write_rows(root)
    more = {"rollout": {"group_size": 3, "max_new_tokens": 6, "engine": "local"}}
    (root / "grpo.yaml").write_text(recipe_to_yaml(grpo_recipe(checkpoint, rows, root / "grpo", **more)))
    (root / "sft.yaml").write_text(recipe_to_yaml(sft_recipe(checkpoint, rows, root / "sft")))
    assert main(["grpo", str(root / "grpo.yaml")]) == 0
    return root


def test_three_steps_of_grpo_learn(place):
    rows = [json.loads(line) for line in (place / "grpo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["grad_norm"] > 0 and row["sampler/logprob_gap_mean"] < 1e-4 for row in rows[1:])


def test_three_steps_of_sft_learn_and_eval_of_run_and_merged_model_agree(place, capsys):
    assert main(["sft", str(place / "sft.yaml")]) == 0
    rows = [json.loads(line) for line in (place / "sft/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    assert main(["eval", str(place / "sft")]) == 0
    assert f"loss {losses[-1]:.4f} a token" in capsys.readouterr().out.splitlines()[1]
    assert main(["export", str(place / "sft"), "--merge"]) == 0
    assert main(["eval", str(place / "sft.yaml"), f"model.path={place}/sft/model"]) == 0
    assert f"loss {losses[-1]:.4f} a token" in capsys.readouterr().out


def test_check_prints_the_proof(place, capsys):
    assert main(["check", str(place / "grpo.yaml")]) == 0
    out = capsys.readouterr().out
    assert "proved: logprobs differ from a plain forward pass by at most" in out
    assert "completions share their prompt" in out


def test_predict_completes_a_prompt(place, capsys):
    words = ["Where is the seven?", "--max-new-tokens", "4"]
    assert main(["predict", str(place / "grpo"), *words]) == 0
    said = capsys.readouterr()
    assert said.out and "--max-new-tokens" in said.err  # four tokens are too few


def test_a_reward_of_boxes_needs_data_coordinates(place, capsys):
    words = [str(place / "grpo.yaml"), "rewards=[{name: iou}]", f"output={place}/boxes"]
    for verb in ("check", "grpo", "eval"):
        assert main([verb, *words]) == 2
        error = capsys.readouterr().err
        assert "rewards.0.name: iou reads boxes" in error and "set data.coordinates" in error


def test_boxes_with_data_coordinates(place, capsys):
    if "llama" in str(place):
        pytest.skip("a text-only model has no coordinates")
    words = [str(place / "grpo.yaml"), "rewards=[{name: iou}]", "data.coordinates=thousandths"]
    assert main(["eval", *words]) == 0
    said = capsys.readouterr()
    assert "a reward failed on 12 of 12 rows" in said.out + said.err  # their answers are points, not boxes


def test_a_row_with_a_picture_is_named_by_a_text_only_model(tmp_path, capsys):
    checkpoint = save_generic_checkpoint(GENERIC["qwen3"], tmp_path / "model")
    recipe = grpo_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", data={"eval": None})
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    for verb in ("check", "grpo"):
        assert main([verb, str(tmp_path / "recipe.yaml")]) != 0
        output = capsys.readouterr()
        said = output.out + output.err
        assert "row-1" in said and "is a text-only model and does not read pictures" in said and str(checkpoint) in said


def test_a_checkpoint_that_fails_its_proof_is_refused_by_every_command(tmp_path, capsys):
    checkpoint = save_generic_checkpoint(GENERIC["granite"], tmp_path / "model")
    recipe = grpo_recipe(checkpoint, text_rows(tmp_path), tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    of_recipe = [[verb, str(tmp_path / "recipe.yaml")] for verb in ("check", "grpo", "eval")]
    for words in (*of_recipe, ["predict", str(checkpoint), "Where?"]):
        assert main(words) != 0
        assert "did not pass its proof" in capsys.readouterr().err


def test_the_report_of_a_run_without_pictures_shows_its_completions(place, capsys):
    if "llama" not in str(place):
        pytest.skip("reads pictures")
    assert main(["report", str(place / "grpo")]) == 0
    page = (place / "grpo/report.html").read_text()
    line = json.loads((place / "grpo/rollouts/step-000003.jsonl").read_text().splitlines()[0])
    assert line["id"] in page and "<img" not in page
    assert escape(line["completions"][0]["text"]) in page


def test_a_row_with_boxes_in_its_prompt_needs_data_coordinates(tmp_path, capsys):
    checkpoint = save_generic_checkpoint(GENERIC["llava"], tmp_path / "model")
    rows = write_rows(tmp_path)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    marked = next(line for line in lines if line["images"])
    marked["messages"][0]["content"] += " <bbox>"
    marked["boxes"] = [[1, 2, 30, 40]]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(grpo_recipe(checkpoint, rows, tmp_path / "run")))
    assert main(["check", str(tmp_path / "recipe.yaml")]) != 0
    output = capsys.readouterr()
    said = output.out + output.err
    assert marked["id"] in said and "does not say how it writes boxes; set data.coordinates" in said
    assert main(["check", str(tmp_path / "recipe.yaml"), "data.coordinates=unit"]) == 0

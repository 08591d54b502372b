"""The commands on a tiny run, through the real command line."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.cli.main import build_parser, main
from tiercel.config import recipe_to_yaml


@pytest.fixture(scope="module")
def run(tiny_checkpoints, tmp_path_factory) -> Path:
    """A finished GRPO run with an adapter that does something."""
    root = tmp_path_factory.mktemp("commands")
    rows = write_rows(root)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, root / "run", optim={"lr": 0.05})
    (root / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["grpo", str(root / "recipe.yaml")]) == 0
    return root / "run"


def test_a_run_ends_with_a_report(run):
    assert (run / "report.html").stat().st_size > 10_000


def test_the_same_command_again_has_nothing_to_do(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["grpo", str(run.parent / "recipe.yaml")]) == 0
    assert "nothing left to do" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_eval_of_a_run_says_before_and_after(run, capsys):
    assert main(["eval", str(run)]) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("before: accuracy")
    assert after.startswith("after:")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"mean reward {rows[0]['eval/reward/mean']:.3f} on 12" in before
    assert f"mean reward {rows[-1]['eval/reward/mean']:.3f} on 12" in after


def test_eval_of_a_recipe_takes_an_adapter(run, capsys):
    adapter = run / "checkpoints/step-000003/adapter"
    assert main(["eval", str(run.parent / "recipe.yaml"), "--adapter", str(adapter)]) == 0
    assert str(adapter) in capsys.readouterr().out


def test_eval_of_an_sft_run_says_its_loss_before_and_after(tiny_checkpoints, tmp_path, capsys):
    """The tower was trained whole, so its weights are next to the adapter."""
    rows = write_rows(tmp_path)
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / "run", freeze=[])
    (tmp_path / "sft.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["sft", str(tmp_path / "sft.yaml")]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in metrics if "eval/loss" in row]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith(f"before: loss {losses[0]:.4f} a token")
    assert after.startswith(f"after:  loss {losses[-1]:.4f} a token") and losses[-1] < losses[0]
    adapter = tmp_path / "run/checkpoints/step-000003/adapter"
    assert main(["eval", str(tmp_path / "sft.yaml"), "--adapter", str(adapter)]) == 0
    assert f"loss {losses[-1]:.4f} a token" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), "--adapter"]) == 2
    assert "use --merge" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 0
    assert main(["eval", str(tmp_path / "sft.yaml"), f"model.path={tmp_path}/run/model"]) == 0
    assert f"loss {losses[-1]:.4f} a token" in capsys.readouterr().out


def test_predict_with_an_image(run, capsys):
    image = run.parent / "1-0.png"
    assert main(["predict", str(run), "--image", str(image), "Where is the seven?", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["predict", str(run), "--image", "gone.png", "Where?"]) == 2
    assert "gone.png is not a file" in capsys.readouterr().err
    assert main(["predict", str(run), "--image", str(image), "<image><image>Where?"]) == 2


def test_merged_export_has_the_adapters_logits_in_plain_transformers(run, tmp_path):
    assert main(["export", str(run), "--merge", "--output", str(tmp_path / "model")]) == 0
    assert main(["export", str(run), "--merge", "--output", str(tmp_path / "model")]) == 2  # never overwritten
    assert main(["export", str(run), "--adapter", "--output", str(tmp_path / "adapter")]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    from peft import PeftModel

    recipe = (run / "config.yaml").read_text()
    base_path = next(line.split("path: ")[1] for line in recipe.splitlines() if "path: " in line)
    base = AutoModelForImageTextToText.from_pretrained(base_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=0, atol=1e-4)
    assert (plain - adapted).abs().max() > 1e-3
    assert set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert (tmp_path / "model/tokenizer.json").is_file()


def test_check_passes_and_counts_tokens(run, capsys):
    assert main(["check", str(run.parent / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert "check passed" in out
    assert "12 rows in tiercel format, 0 rejected" in out
    assert "times as many" in out
    assert "reward variety" in out


def test_check_reads_the_right_answer_of_every_row(tiny_checkpoints, tmp_path, capsys):
    """The third row has an inverted box, and iou applies to it. No reward that reads boxes applies to the fourth."""
    rows = write_rows(tmp_path)
    lines = [json.loads(line) for line in rows.read_text().splitlines() if json.loads(line)["images"]]
    for number, line in enumerate(lines):
        line["answer"] = [50, 60, 40, 70] if number in (2, 3) else [1, 2, 30, 40]
        line["task"] = "none" if number == 3 else "box"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewards = [{"name": "iou", "where": {"column": "task", "equals": ["box"]}}, {"name": "length", "max_tokens": 4}]
    recipe = tmp_path / "recipe.yaml"
    given = grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data={"eval": None}, rewards=rewards)
    recipe.write_text(recipe_to_yaml(given))
    assert main(["check", str(recipe), "data.max_bad_fraction=0.2"]) == 0
    out = capsys.readouterr().out
    assert f"{len(lines)} rows in tiercel format, 1 rejected" in out
    assert f"rejected {rows}:3 ({lines[2]['id']}) answer: [50, 60, 40, 70] is an empty or inverted box" in out
    assert main(["check", str(recipe)]) == 2


def test_check_of_an_sft_recipe(tiny_checkpoints, tmp_path, capsys):
    recipe = sft_recipe(tiny_checkpoints["ovis2"], write_rows(tmp_path), tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 0
    assert "valid SFT recipe" in capsys.readouterr().out


def cut_short(path: Path) -> None:
    """Its header stays whole."""
    path.write_bytes(path.read_bytes()[:-200])


def test_check_decodes_pictures_and_frames_where_it_is_asked_to(tiny_checkpoints, tmp_path, capsys):
    rows = write_rows(tmp_path)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(rows.read_text().splitlines()[1] + "\n")
    video = {"videos": [["4-0.png", "4-0.png"]], "messages": [{"role": "user", "content": "?"}]}
    with rows.open("a") as stream:
        stream.write(json.dumps({"id": "frames", **video, "answer": "7"}) + "\n")
    data = {"eval": str(heldout), "max_bad_fraction": 1.0}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data=data)))
    assert main(["check", str(recipe), "--decode"]) == 0
    out = capsys.readouterr().out
    assert "every picture decoded, all whole: images 12, rows 13" in out and "all whole: images 1, rows 1" in out
    cut_short(tmp_path / "1-0.png")
    cut_short(tmp_path / "4-0.png")
    assert main(["check", str(recipe)]) == 0
    assert f"{rows}: 13 rows in tiercel format, 0 rejected" in capsys.readouterr().out
    assert main(["check", str(recipe), "--decode"]) == 0
    out = capsys.readouterr().out
    assert f"{rows}: 13 rows in tiercel format, 3 rejected" in out
    assert f"{heldout}: 1 row in tiercel format, 1 rejected" in out
    assert all(f"({name})" in out for name in ("row-1", "row-4", "frames")) and "4-0.png: cannot be read" in out
    assert main(["check", str(recipe), "--decode", "data.max_bad_fraction=0.01"]) == 2


@pytest.mark.parametrize(
    ("package", "override"), [("deepspeed", "train.strategy=deepspeed"), ("vllm", "rollout.engine=vllm")]
)
def test_check_says_of_a_missing_package_what_a_run_says(tiny_checkpoints, tmp_path, capsys, package, override):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run")))
    for verb in ("check", "grpo"):
        assert main([verb, str(recipe), override]) == 2
        said, error = capsys.readouterr()
        assert f"needs the package {package}; pip install {package}, or use" in error
        is_looked_at = "rows in tiercel format" in said and "one step" in said
        assert is_looked_at == (verb == "check")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_check_says_how_many_rows_are_held_out(tiny_checkpoints, tmp_path, capsys):
    changes = {"data": {"eval": {"fraction": 0.25}}}
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **changes)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/rows.jsonl: 9 rows in tiercel format" in out
    assert f"held out of {tmp_path}/rows.jsonl: 3 rows in tiercel format" in out
    assert main(["check", str(tmp_path / "recipe.yaml"), "data.eval.fraction=0.01"]) == 2
    assert "data.eval: fraction 0.01 of 12 usable training rows is 0 rows" in capsys.readouterr().err


def test_other_verbs_take_held_out_rows_and_parts_of_files(tiny_checkpoints, tmp_path, capsys):
    rows = write_rows(tmp_path)
    data = {"train": f"{rows}#10", "eval": {"count": 3}}
    for kind, make in (("sft", sft_recipe), ("grpo", grpo_recipe)):
        recipe = tmp_path / f"{kind}.yaml"
        recipe.write_text(recipe_to_yaml(make(tiny_checkpoints["qwen2_vl"], rows, tmp_path / kind, data=data)))
        assert main(["eval", str(recipe)]) == 0
        assert "on 3 held-out rows" in capsys.readouterr().out
    assert main(["data", "preview", str(recipe), "--output", str(tmp_path / "page.html")]) == 0
    assert "page.html: 7 rows" in capsys.readouterr().out
    assert main(["plan", str(recipe), "learner.compile=false", "--gpu-memory", "80GB"]) == 0


def test_check_names_a_missing_image_and_a_broken_reward(tiny_checkpoints, tmp_path, capsys):
    rows = write_rows(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run")))
    (tmp_path / "mine.py").write_text("def variety(sample):\n    return sample.nonsense\n")
    assert main(["check", str(recipe)]) == 3
    assert "nonsense" in capsys.readouterr().err
    (tmp_path / "4-0.png").unlink()
    assert main(["check", str(recipe)]) == 2
    captured = capsys.readouterr()
    assert "row-4" in captured.out and "4-0.png" in captured.out
    assert "max_bad_fraction" in captured.err


def test_check_names_a_variable_that_a_reward_needs_and_that_is_not_set(
    tiny_checkpoints, tmp_path, capsys, monkeypatch
):
    rows = write_rows(tmp_path)
    rewards = [{"call": f"{rows.parent}/mine.py:variety", "env": ["SERVICE_KEY"]}]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        recipe_to_yaml(grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", rewards=rewards))
    )
    monkeypatch.delenv("SERVICE_KEY", raising=False)
    assert main(["check", str(recipe)]) == 2
    assert "rewards.0.env: is SERVICE_KEY, which is not set in the environment" in capsys.readouterr().err
    monkeypatch.setenv("SERVICE_KEY", "value")
    assert main(["check", str(recipe)]) == 0


def test_every_command_has_help_with_an_example(capsys):
    for name in ("demo", "sft", "grpo", "check", "doctor", "eval", "predict", "export", "report"):
        with pytest.raises(SystemExit) as ended:  # by argparse
            main([name, "--help"])
        assert ended.value.code == 0
        assert "example: tiercel" in " ".join(capsys.readouterr().out.split())
    assert build_parser().prog == "tiercel"

"""The nearest recipe that fits a memory: which keys change, that the plan of the written recipe fits, and what is
reported."""

import re

import pytest

from benchmarks.published import save_config
from tests.planning.test_memory import recipe_of
from tiercel.cli.main import main
from tiercel.config import load_recipe, recipe_to_yaml
from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.schema import SftRecipe
from tiercel.planning import fit
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.plan import make_plan

CASES = {  # size of the checkpoint, GB, keys that must change, keys that must not
    "3b on 80": ("3b", 80, set(), {"model.quantize", fit.COMPLETION}),
    "7b on 24": ("7b", 24, {"model.quantize"}, {fit.COMPLETION, fit.PROMPT}),
}


def rows_of(text: str) -> dict[str, float]:
    """Gigabytes that each key saves, by the lines of a file or of what is printed."""
    found = re.findall(r"([\w.]+): \S+ -> \S+: (saves|takes) ([\d.]+) GB", text)
    return {key: float(size) if kind == "saves" else -float(size) for key, kind, size in found}


@pytest.mark.catalogue  # it searches the remedies
@pytest.mark.parametrize("case", ["3b on 80", "7b on 24"])
def test_what_is_written_fits_and_says_what_changed(tmp_path, capsys, case):
    size, gigabytes, changed, kept = CASES[case]
    recipe = recipe_of(save_config("qwen2_5_vl", size, tmp_path / "model"), {})
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    words = ["plan", str(tmp_path / "recipe.yaml"), "--fit", f"{gigabytes}GB"]
    assert main(words) == 0
    said = capsys.readouterr().out
    written = tmp_path / f"recipe-{gigabytes}gb.yaml"
    assert f"{written}: " in said
    saved = rows_of(written.read_text())
    assert saved == rows_of(said) and changed <= set(saved) and not kept & set(saved)
    again = load_recipe("grpo", written, check_paths=False)
    assert not rule_problems(again)
    machine = Machine(ranks=1, memory_bytes=gigabytes * 10**9, device=DEVICES["h100"])
    plan = make_plan(again, machine)
    assert plan.chosen == "single"
    assert (make_plan(recipe, machine).chosen is None) == bool(saved)
    assert main(words) == 2 and "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    (
        (["--output", "new.yaml"], ["--output: is set, but --fit is not; add --fit SIZE"]),
        (
            ["--fit", "24GB", "--gpu-memory", "80GB", "--json", "--prompt-tokens", "9"],
            [
                "--gpu-memory: is set beside --fit",
                "--json: is set beside --fit",
                "--prompt-tokens: is set beside --fit",
            ],
        ),
    ),
)
def test_flags_without_effect_are_refused(tmp_path, capsys, words, said):
    assert main(["plan", str(tmp_path / "recipe.yaml"), *words]) == 2
    told = capsys.readouterr().err
    assert all(each in told for each in said)


def test_lengths_are_the_last_to_change(tmp_path):
    """And no rule of the recipe is broken on the way."""
    directory = save_config("qwen2_5_vl", "7b", tmp_path / "model")
    recipe = recipe_of(directory, {"model": {"max_pixels": 1_000_000}})
    steps = list(fit._ladder(recipe))
    fewer_bits = {"model.quantize": "nf4", "optim.name": "adamw_8bit"}
    assert steps[:3] == [{}, {"model.quantize": "nf4"}, fewer_bits]
    assert steps[3] == {**fewer_bits, fit.COMPLETION: 96}
    assert steps[-1] == {**fewer_bits, fit.COMPLETION: 64, fit.PROMPT: 256, fit.PIXELS: 125_000}
    whole = [key for step in fit._ladder(recipe_of(directory, {"lora": None})) for key in step]
    assert "optim.name" in whole and "model.quantize" not in whole


@pytest.mark.catalogue
def test_what_cannot_fit_is_told_with_what_helps(tmp_path, capsys):
    directory = save_config("qwen2_5_vl", "72b", tmp_path / "model")
    tree = {
        "model": {"path": str(directory)},
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 256},
        "train": {"steps": 1},
        "output": "run",
    }
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(SftRecipe.model_validate(tree)))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--fit", "24GB"]) == 2
    assert "does not fit into 1 x 24GB of GPU memory; add the section lora, or more GPUs" in capsys.readouterr().err
    assert not (tmp_path / "recipe-24gb.yaml").exists()

"""`tiercel plan` through the command line, on a tiny model's config.json alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.arguments import build_parser
from tiercel.cli.main import main
from tiercel.config import load_recipe, recipe_to_yaml
from tiercel.planning import plan as planning
from tiercel.planning.devices import DEVICES
from tiercel.planning.memory import Measured
from tiercel.planning.options import Subject, measure, study
from tiercel.planning.probe import Composition, LinearBytes, fitted

UNREAD = {"train": {"strategy"}, "model": {"reference"}, "learner": {"compile"}, "algorithm": {"kl": {"coef"}}}
MEASURED: dict[tuple[int, str], Measured] = {}
NOT_COMPILED = "learner.compile=false"  # where a test is about something else, because compiling takes seconds


def recipe_without_weights(checkpoint: Path, root: Path) -> Path:
    bare = root / "config only"
    bare.mkdir()
    shutil.copy(checkpoint / "config.json", bare)
    file = root / "recipe.yaml"
    file.write_text(recipe_to_yaml(grpo_recipe(bare, write_rows(root), root / "run")))
    return file


@pytest.fixture(scope="module")
def recipe(tiny_checkpoints, tmp_path_factory) -> Path:
    return recipe_without_weights(tiny_checkpoints["qwen2_5_vl"], tmp_path_factory.mktemp("plan"))


@pytest.fixture
def measured(monkeypatch) -> Callable[[Subject], Measured]:
    """Measure a learner once for all plans that differ in nothing that a measurement reads."""
    monkeypatch.setattr(planning, "measure", measured_once)
    return measured_once


def measured_once(subject: Subject) -> Measured:
    key = subject.prompt_tokens, subject.recipe.model_dump_json(exclude=UNREAD)
    if key not in MEASURED:
        MEASURED[key] = measure(subject)
    return MEASURED[key]


@pytest.mark.usefixtures("measured")
def test_a_plan_that_fits_says_what_it_chose(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "2", "--gpu-memory", "80GB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("planned for 2 x h100 with 80GB") and "--device (b200, " in said
    assert "train.strategy: ddp, the least communication" in said and "most during rollout" in said


def test_compiled_layers_keep_less(recipe, measured):
    found = measured(study(load_recipe("grpo", recipe, check_paths=False), None))
    assert found.compiled is not None
    assert 0 < found.compiled().per_layer_token < found.learn.per_layer_token


def test_a_measurement_does_not_read_what_plans_are_compared_by(recipe, measured):
    given = load_recipe("grpo", recipe, check_paths=False)
    other = {"train.strategy": "fsdp2", "model.reference": "cpu", "learner.compile": False, "algorithm.kl.coef": 0.1}
    found, expected = measure(study(given.with_values(other), None)), measured(study(given, None))
    asked_for = {"compiled": None, "gathered": None}  # functions, which are called if a plan needs them
    assert replace(found, **asked_for) == replace(expected, **asked_for)


@pytest.mark.parametrize("name", ("gemma3", "gemma4", "qwen3_5_moe"))
def test_layers_that_differ_are_planned(tiny_checkpoints, tmp_path, capsys, name):
    file = recipe_without_weights(tiny_checkpoints[name], tmp_path)
    assert main(["plan", str(file), "--gpu-memory", "80GB"]) == 0
    assert "train.strategy: single, which fits" in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_json_has_every_strategy(recipe, capsys):
    assert main(["plan", str(recipe), NOT_COMPILED, "--gpus", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [option["memory"]["strategy"] for option in plan["options"]] == ["ddp", "fsdp2", "deepspeed"]
    assert plan["chosen"] == "ddp" and plan["options"][0]["fits"] and plan["options"][0]["largest_tokens"] > 1000


@pytest.mark.catalogue  # it searches the remedies
def test_what_does_not_fit_ends_with_2_and_a_change(recipe, capsys):
    words = ["learner.max_tokens_per_microbatch=20000", "train.strategy=single"]
    assert main(["plan", str(recipe), *words, "--gpu-memory", "1.7GB"]) == 2
    said = capsys.readouterr().err
    assert "does not fit into 1 x 1.7GB of GPU memory; this fits: learner.max_tokens_per_microbatch: " in said
    tokens = said.strip().rpartition(" ")[2]
    words = [f"learner.max_tokens_per_microbatch={tokens}", "train.strategy=single"]
    assert main(["plan", str(recipe), *words, "--gpu-memory", "1.7GB"]) == 0


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("place", ("device", "cpu"))
@pytest.mark.parametrize("strategy", ("ddp", "fsdp2"))
def test_the_copy_of_the_start_is_counted_where_it_lies(recipe, capsys, place, strategy):
    words = ["lora=null", "algorithm.kl.coef=0.1", f"model.reference={place}", "model.dtype=bfloat16", NOT_COMPILED]
    assert main(["plan", str(recipe), *words, f"train.strategy={strategy}", "--gpus", "2", "--json"]) == 0
    (option,) = json.loads(capsys.readouterr().out)["options"]
    moments = option["memory"]["components"]["optimizer moments"]  # 8 bytes per weight, and fsdp2 divides both
    on_device = option["memory"]["components"].get("copy of the start", 0)
    on_host = option["memory"]["host"].get("copy of the start", 0)
    assert (on_device, on_host) == ((moments // 4, 0) if place == "device" else (0, moments // 4))


@pytest.mark.parametrize("name", DEVICES)
def test_the_command_line_knows_every_device(name):
    assert build_parser().parse_args(["plan", "recipe.yaml", "--device", name]).device == name


def test_the_fit_goes_through_what_was_measured():
    assert fitted(lambda layers, tokens: 5 + 7 * layers + 2 * tokens + 3 * layers * tokens, 100) == LinearBytes(
        constant=5, per_layer=7, per_token=2, per_layer_token=3
    )


@pytest.mark.parametrize("tokens", (12, 13, 40, 41, 99, 1000))
def test_a_microbatch_has_the_tokens_asked_for(tokens):
    items = Composition(prompt_tokens=10, completion_tokens=2, group_size=4).items(tokens, 3)
    assert sum(item.shared_length for item in items) == tokens
    assert all(1 <= len(item.continuations) <= 4 for item in items)


@pytest.mark.usefixtures("measured")
def test_muon_keeps_one_moment_of_the_matrices_and_plans_no_strategy_that_cuts_them(recipe, capsys):
    def options(*words: str) -> dict[str, int]:
        words = ("lora=null", "model.dtype=bfloat16", NOT_COMPILED, "--gpus", "2", "--json", *words)
        assert main(["plan", str(recipe), *words]) == 0
        found = json.loads(capsys.readouterr().out)["options"]
        usable = [option for option in found if not option["memory"].get("obstacle") and option["fits"]]
        return {option["memory"]["strategy"]: option["memory"]["components"]["optimizer moments"] for option in usable}

    two, one = options("train.strategy=ddp")["ddp"], options("optim.name=muon")
    assert one.keys() == {"ddp"} and 0.4 * two < one["ddp"] < two

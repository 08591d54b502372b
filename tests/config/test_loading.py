"""Files, overrides and kinds of recipes; writing recipes and comparing them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.config.recipes import GOOD
from tiercel.config import Kind, detect_kind, flatten, load_recipe, recipe_to_yaml
from tiercel.config.loading import recipe_of_tree
from tiercel.config.schema import Algorithm, Learner
from tiercel.errors import RecipeError

ROOT = Path(__file__).parents[2]


def problems(kind: Kind, path: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(kind, path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.PARQUET"])
def test_a_file_of_rows_in_place_of_a_recipe_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"messages": []}\n{"messages": []}\n\xff')
    (said,) = problems("sft", str(tmp_path / name))
    assert said.startswith("is a file of rows, not a recipe;") and "tiercel init" in said
    (tmp_path / name).unlink()
    assert problems("sft", str(tmp_path / name))[0].startswith("there is no such file")


def test_all_problems_are_told_at_once(workplace: Path):
    """Problems of the overrides, the schema, the rules and the paths. The rules judge what the schema accepts."""
    found = problems(
        "grpo",
        "grpo.yaml",
        (
            "nonsense",
            "lr=1",
            "optim.schedule=cos",
            "rollout.group_size=1",
            "data.train=nowhere.jsonl",
            "train.steps=10",
            "train.epochs=1",
        ),
    )
    assert [line.split(":")[0] for line in found] == [
        'override "nonsense"',
        "optim.schedule",
        "lr",
        "train.steps",
        "rollout.group_size",
        "data.train",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (10, None)),
        (("train.epochs=2",), (None, 2)),
        (("train.epochs=null",), (10, None)),
        (("train.epochs=~",), (10, None)),
        (("train.epochs=2", "train.steps=null"), (None, 2)),
    ],
)
def test_an_override_takes_the_place_of_the_key_that_it_excludes(workplace: Path, overrides, expected):
    train = load_recipe("grpo", "grpo.yaml", overrides).train
    assert (train.steps, train.epochs) == expected


def test_a_rule_is_silent_about_a_key_that_is_wrong_already(workplace: Path):
    assert len(problems("grpo", "grpo.yaml", ("train.steps=ten", "optim.warmup_steps=100"))) == 1


def test_a_rule_is_silent_about_a_key_that_may_have_been_meant(workplace: Path):
    text = GOOD["grpo"].replace("steps: 10", "stepz: 10")
    Path("typo.yaml").write_text(text, encoding="utf-8")
    assert problems("grpo", "typo.yaml") == ("train.stepz: unknown key (its value is 10); use train.steps",)


def test_a_rule_speaks_beside_a_misnamed_key_that_is_given_too(workplace: Path):
    found = problems("grpo", "grpo.yaml", ("rollout.group_size=1", "num_generations=1"))
    assert [line.split(":")[0] for line in found] == ["num_generations", "rollout.group_size"]


def test_missing_sections_do_not_hide_the_rest(workplace: Path):
    Path("bare.yaml").write_text("rollout: {group_size: 1}\n", encoding="utf-8")
    found = problems("grpo", "bare.yaml")
    assert [line.split(":")[0] for line in found] == [
        "model",
        "data",
        "train",
        "output",
        "rewards",
        "rollout.group_size",
    ]


def test_overrides_change_leaves_lists_and_sections(workplace: Path):
    recipe = load_recipe(
        "grpo",
        "grpo.yaml",
        [
            "optim.lr=1e-5",
            "rewards.0.weight=2",
            'rollout.stop=["x", "</answer>"]',
            "algorithm.kl.coef=4E-2",
            "lora.rank=16",
            "data.system='a=b: c'",
            "train={steps: 3, seed: 7}",
        ],
    )
    assert recipe.optim.lr == 1e-5
    assert [reward.weight for reward in recipe.rewards] == [2.0, 0.2]
    assert recipe.rollout.stop == ("x", "</answer>")
    assert recipe.algorithm.kl.coef == 0.04
    assert recipe.lora is not None and recipe.lora.rank == 16
    assert recipe.data.system == "a=b: c"
    assert (recipe.train.steps, recipe.train.seed) == (3, 7)


@pytest.mark.parametrize(
    "text", ["Use #tags and # marks", "First line.\nSecond line.", "one # two", "#1 rule", '"a\nb"']
)
def test_an_override_whose_text_yaml_would_change_is_refused(workplace: Path, text: str):
    with pytest.raises(RecipeError) as error:
        load_recipe("grpo", "grpo.yaml", [f"data.system={text}"])
    assert "put the text in double quotes" in str(error.value)
    quoted = json.dumps(text)
    assert load_recipe("grpo", "grpo.yaml", [f"data.system={quoted}"]).data.system == text


def test_a_key_with_dots_in_a_file_is_told_how_to_write_it(workplace: Path):
    tree = yaml.safe_load(Path("grpo.yaml").read_text())
    Path("dotted.yaml").write_text(yaml.safe_dump({**tree, "optim.lr": 1e-4}))
    (line,) = problems("grpo", "dotted.yaml")
    assert line.startswith("optim.lr: ") and "below optim:" in line


def test_the_last_override_of_a_key_counts(workplace: Path):
    assert load_recipe("sft", "sft.yaml", ["train.steps=3", "train.steps=4"]).train.steps == 4


def test_an_override_makes_a_section_that_is_null(workplace: Path):
    recipe = load_recipe("sft", "sft.yaml", ["lora=null", "lora.rank=4"])
    assert recipe.lora is not None and recipe.lora.rank == 4


def test_null_takes_out_a_section_that_cannot_be_null(workplace: Path):
    overrides = ["learner.max_tokens_per_microbatch=99", "learner=null", "algorithm.kl=null", "lora=null"]
    recipe = load_recipe("grpo", "grpo.yaml", overrides)
    assert recipe.learner == Learner() and recipe.algorithm == Algorithm() and recipe.lora is None
    assert "algorithm.loss" in problems("grpo", "grpo.yaml", ("algorithm.loss=null",))[0]
    assert "data" in problems("grpo", "grpo.yaml", ("data=null",))[0]


def test_an_override_leaves_a_shared_anchor_alone(workplace: Path):
    text = GOOD["grpo"].replace(
        "[{name: exact}, {name: format, weight: 0.2}]", "[&a {name: exact}, {<<: *a, name: iou}]"
    )
    Path("anchor.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe("grpo", "anchor.yaml", ["rewards.0.weight=3"])
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [("exact", 3.0), ("iou", 1.0)]


def test_keys_of_other_rewards_may_be_null(workplace: Path):
    """Runs of earlier versions have them in their config.yaml."""
    all_null = "{name: exact, call: null, weight: 1.0, pattern: null, max_tokens: null, judge: null, model: null}"
    assert load_recipe("grpo", "grpo.yaml", [f"rewards.0={all_null}"]) == load_recipe("grpo", "grpo.yaml")
    by_call = ["rewards.0={name: null, call: mine.py:score, choices: null, where: null}"]
    assert load_recipe("grpo", "grpo.yaml", by_call).rewards[0].title == "score"
    assert "rewards.0.pattern" in problems("grpo", "grpo.yaml", ("rewards.0.patern=null",))[0]


@pytest.mark.parametrize(
    "entry",
    [
        "{name: exct}",
        "{name: length}",
        "{name: iou, threshold: 2}",
        "{name: judge, judge: {model: m}}",
        "iou",
        "{name: [a]}",
        "{judge: {model: m}}",
    ],
)
def test_a_wrong_reward_hides_no_other_problem(workplace: Path, entry: str):
    others = ("rewards.1={name: format, pattern: '(a'}", "optim.minibatches=3", "rollout.min_new_tokens=999")
    found = problems("grpo", "grpo.yaml", (f"rewards.0={entry}", *others))
    keys = [line.partition(":")[0] for line in found]
    assert len(keys) == 4 and keys[0].startswith("rewards.0")
    assert set(keys[1:]) == {"optim.minibatches", "rollout.min_new_tokens", "rewards.1.pattern"}


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        ("{call: 'a.b:c', pattern: x, env: [K=1]}", {"pattern", "env"}),
        ("{name: iou, weight: 0, pattern: x}", {"pattern", "weight"}),
        ("{name: soft_overlong, max_tokens: 5, buffer: 9, ngram: 2}", {"ngram", "buffer"}),
    ],
)
def test_the_only_reward_has_all_its_problems_at_once(workplace: Path, entry: str, keys: set[str]):
    found = problems("grpo", "grpo.yaml", (f"rewards=[{entry}]",))
    assert {line.partition(":")[0] for line in found} == {f"rewards.0.{key}" for key in keys}


@pytest.mark.parametrize(
    ("lacking", "meant", "others"),
    [
        ("train", {"max_steps": 5}, ()),
        ("train", {"trian": {"steps": 5}}, ()),
        ("data", {"train_dataset": "rows.jsonl"}, ()),
        ("model", {"model_name_or_path": "a/b"}, ()),
        ("rewards", {"reward_funcs": ["mine.py:right"]}, ()),
        ("data.train", {"data": {"path": "rows.jsonl"}}, ()),
        ("model.path", {"model": {"name": "a/b"}}, ()),
        ("train", {"logging_steps": 5}, ("train",)),  # which does not say how long the run is
        ("data", {"num_workers": 2}, ("data",)),
    ],
)
def test_a_key_that_goes_by_another_name_is_not_missing_as_well(lacking: str, meant: dict, others: tuple[str, ...]):
    tree = yaml.safe_load(GOOD["grpo"])
    del tree[lacking.partition(".")[0]]
    with pytest.raises(RecipeError) as caught:
        recipe_of_tree("grpo", tree | meant, check_paths=False)
    keys = [line.partition(":")[0] for line in caught.value.problems]
    (unknown,) = set(keys) - set(others)
    assert unknown.partition(".")[0] in meant and set(keys) == {unknown, *others}


def test_null_for_a_key_that_the_reward_needs_is_a_missing_key(workplace: Path):
    (found,) = problems("grpo", "grpo.yaml", ("rewards=[{name: length, max_tokens: null}]",))
    assert found.startswith("rewards.0.max_tokens: is required; the reward length needs")


def test_an_own_loss_without_braces_is_told_how_to_write_it(workplace: Path):
    (found,) = problems("grpo", "grpo.yaml", ("algorithm.loss=mine.py:near",))
    assert "{call: mine.py:near}" in found


def test_files_that_cannot_be_read(workplace: Path):
    assert "no such file" in problems("sft", "nowhere.yaml")[0]
    assert "this is a directory" in problems("sft", "empty")[0]
    Path("latin.yaml").write_bytes(b"model: {}\n# caf\xe9\n")
    assert problems("sft", "latin.yaml") == ("line 2 is not UTF-8 text; save the file as UTF-8",)
    Path("utf16.yaml").write_text(GOOD["sft"], encoding="utf-16")
    assert "UTF-8" in problems("sft", "utf16.yaml")[0]


def test_a_byte_order_mark_is_no_problem(workplace: Path):
    Path("bom.yaml").write_text(GOOD["sft"], encoding="utf-8-sig")
    assert load_recipe("sft", "bom.yaml").train.steps == 10


def test_paths_are_checked_unless_told_not_to(workplace: Path):
    override = ["data.train=nowhere.jsonl"]
    assert load_recipe("sft", "sft.yaml", override, check_paths=False).data.train == "nowhere.jsonl"
    assert "no such file" in problems("sft", "sft.yaml", tuple(override))[0]


def test_deep_nesting_is_refused_not_a_crash(workplace: Path):
    for depth in (250, 1500):
        Path("deep.yaml").write_text("[" * depth + "]" * depth, encoding="utf-8")
        assert len(problems("sft", "deep.yaml")) == 1
        Path("deep.yaml").write_text("data: " + "[" * depth + "]" * depth, encoding="utf-8")
        assert len(problems("sft", "deep.yaml")) == 1


def test_kinds_are_told_apart(workplace: Path):
    assert detect_kind("sft.yaml") == "sft"
    assert detect_kind("grpo.yaml") == "grpo"
    assert detect_kind("sft.yaml", ["rollout.group_size=4"]) == "grpo"
    with pytest.raises(RecipeError, match="no such file"):
        detect_kind("nowhere.yaml")


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_written_recipe_reads_back_equal(workplace: Path, kind: Kind):
    overrides = ["optim.lr=1e-5", "data.system='yes'", "optim.eps=1e-12", "lora=null", "reliability.stall_timeout=1e16"]
    recipe = load_recipe(kind, f"{kind}.yaml", overrides)
    text = recipe_to_yaml(recipe)
    Path("config.yaml").write_text(text, encoding="utf-8")
    again = load_recipe(kind, "config.yaml")
    assert again == recipe
    assert recipe_to_yaml(again) == text
    assert text.startswith("model:\n  path: Qwen/Qwen2-VL-2B-Instruct\n")


def test_flat_recipes_differ_in_the_keys_that_differ(workplace: Path):
    one = flatten(load_recipe("grpo", "grpo.yaml"))
    other = flatten(load_recipe("grpo", "grpo.yaml", ["rewards.1.weight=1", "optim.betas=[0.9, 0.95]", "lora=null"]))
    assert one["rewards.1.weight"] == 0.2
    assert one["optim.betas"] == (0.9, 0.999)
    assert one["algorithm.kl.coef"] == 0.0
    assert other["lora"] is None
    shared = one.keys() & other.keys()
    assert {key for key in shared if one[key] != other[key]} == {"rewards.1.weight", "optim.betas"}
    assert one.keys() - other.keys() == {
        "lora.rank",
        "lora.alpha",
        "lora.dropout",
        "lora.targets",
        "lora.init",
        "lora.kind",
        "lora.start",
    }


def test_reading_a_recipe_imports_nothing_heavy(workplace: Path):
    code = (
        "import sys\n"
        "from tiercel.config import load_recipe\n"
        "load_recipe('grpo', 'grpo.yaml')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'peft', 'PIL', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert finished.returncode == 0, finished.stderr

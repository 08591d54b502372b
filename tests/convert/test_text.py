"""The text of a recipe."""

import pytest

from tests.convert.helpers import GRPO, SFT, drafted, text_of
from tiercel.config.yaml_text import parse
from tiercel.convert.text import COMMENT_COLUMN, recipe_text

LONG = "/data/" + "x" * 60


@pytest.mark.parametrize("length", range(COMMENT_COLUMN - 12, COMMENT_COLUMN + 4))
def test_a_value_that_reaches_the_column_keeps_its_comment_apart(length):
    value = "/d/" + "x" * length
    tree, _ = parse(text_of(f"{GRPO} --output_dir {value} --dataset {value}"))
    assert tree["output"] == value and tree["data"]["train"] == value


@pytest.mark.parametrize(
    "value",
    [
        "a: b",
        "a # b",
        "{x",
        "[1, 2",
        "yes, 'no'",
        "1e-5",
        "true",
        "null",
        "- a",
        "*x",
        "&x",
        "!x",
        "%x",
        "a\nb: c #",
        "  a",
        '"q"',
    ],
)
def test_a_text_stays_what_it_is(value):
    quoted = "'" + value.replace("'", "'\\''") + "'"
    tree, _ = parse(text_of(f"{GRPO.replace('format', 'mine')} --system {quoted} --stop_words {quoted} {quoted}"))
    assert tree["data"]["system"] == value
    assert tree["rollout"]["stop"] == [value, value]


def test_a_long_text_is_one_line():
    words = "word " * 60 + "{end}"
    tree, _ = parse(text_of(f"{GRPO} --system '{words}'"))
    assert tree["data"]["system"] == words


def test_the_head_names_the_version_and_the_processes():
    text = text_of(f"NPROC_PER_NODE=4 {SFT}")
    assert "those of ms-swift 4.6.0.dev0, commit 3602360" in text
    assert "tiercel sft RECIPE --nproc 4" in text


def test_a_comment_says_where_a_value_comes_from():
    text = text_of(
        f"{SFT} --learning_rate 1e-5 --gradient_accumulation_steps 4 --lora_rank 4 --report_to wandb "
        "--per_device_train_batch_size 2"
    )
    lines = {line.split(":")[0].strip(): line.partition(" # ")[2] for line in text.splitlines()}
    assert lines["lr"] == "--learning_rate 1e-5"
    assert lines["rank"] == "--lora_rank"
    batch = "--per_device_train_batch_size 2, --gradient_accumulation_steps 4"
    assert lines["prompts_per_step"] == f"{batch}; 2 per device x 1 process x 4 accumulated"
    assert lines["trackers"] == "--report_to"
    assert lines["weight_decay"] == "ms-swift's default of --weight_decay"


def test_every_value_of_a_draft_is_in_the_text():
    draft = drafted(f"{GRPO} --report_to wandb --save_total_limit 2 --vllm_mode colocate --use_vllm true")
    tree, _ = parse(recipe_text(draft))
    for key, value in draft.values.items():
        branch = tree
        for part in key.split("."):
            branch = branch[part]
        assert branch == value, key

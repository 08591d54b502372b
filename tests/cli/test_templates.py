"""`check` with chat templates other than the checkpoint's own."""

from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml

OF_OTHERS = r"<think>.*</think>\s*<answer>.*</answer>"


def written(checkpoint: Path, root: Path, change: tuple[str, str], **keys) -> str:
    """Write a recipe whose template is the checkpoint's with one text changed to another."""
    template = (checkpoint / "chat_template.jinja").read_text()
    assert change[0] in template
    (root / "other.jinja").write_text(template.replace(*change))
    recipe = grpo_recipe(checkpoint, write_rows(root), root / "run", **keys)
    (root / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    return str(root / "recipe.yaml")


@pytest.mark.parametrize(
    ("opened", "pattern", "expected"),
    [
        ("<think>\\n", None, 1),
        ("<think>\\n", OF_OTHERS, 1),
        ("<think>\\n\\n</think>\\n\\n", OF_OTHERS, 1),
        ("", None, 1),
        ("", OF_OTHERS, 0),
    ],
)
def test_the_made_up_completion_is_one_of_the_template(tiny_checkpoints, tmp_path, capsys, opened, pattern, expected):
    change = "<|im_start|>assistant\n", f"<|im_start|>assistant\n{{{{ '{opened}' }}}}"
    rewards = [{"name": "format", "pattern": pattern}]
    recipe = written(tiny_checkpoints["qwen2_5_vl"], tmp_path, change, rewards=rewards)
    assert main(["check", recipe, f"data.template={tmp_path}/other.jinja"]) == 0
    assert f"reward format: {expected} for a made-up completion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("<|im_end|>", "ends with <|im_end|>, as the chat template writes it"),
        (
            "<|endoftext|>",
            "ends with <|endoftext|>, as the chat template writes it; a completion ends with <|endoftext|> or",
        ),
        ("", "writes no end after an assistant's turn: a completion ends with <|im_end|>"),
        ("<|eot|>", "writes '<|eot|>' after an assistant's turn, which is not a token of this tokenizer"),
    ],
)
def test_check_says_what_ends_a_turn(tiny_checkpoints, tmp_path, capsys, end, says):
    recipe = written(tiny_checkpoints["qwen2_5_vl"], tmp_path, ("<|im_end|>", end))
    assert main(["check", recipe, f"data.template={tmp_path}/other.jinja"]) == 0
    assert says in capsys.readouterr().out

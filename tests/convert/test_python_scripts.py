"""Python scripts that train with TRL."""

import pytest

from tests.convert.helpers import drafted, told
from tiercel.cli.import_command import imported
from tiercel.convert.python_scripts import words_of_script
from tiercel.errors import RecipeError

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
MODEL = "org/vl"
rate = 1e-5
raise SystemExit("never executed")
rows = load_dataset("org/rows", split="train")
def right(completions, **kwargs): return [1.0 for _ in completions]
arguments = GRPOConfig(
    output_dir="out", learning_rate=rate, num_generations=4, bf16=True, use_vllm=False, odd=1, max_steps=None,
    run_name=f"x-{rate}",
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=[right], args=arguments, train_dataset=rows,
                      peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
"""


def written(folder, text):
    file = folder / "train.py"
    file.write_text(text)
    return file


def test_keyword_arguments_become_a_recipe(tmp_path):
    draft = drafted(SCRIPT, written(tmp_path, SCRIPT))
    expected = {
        "model.path": "org/vl", "data.train": "hf:org/rows:train", "output": "out", "optim.lr": 1e-5,
        "rollout.group_size": 4, "lora.rank": 16, "lora.alpha": 8.0, "lora.targets": r"(.*\.)?(q_proj|v_proj)",
        "rewards": [{"call": "mine.py:right"}], "rollout.engine": "local",
    }  # fmt: skip
    assert {key: draft.values.get(key) for key in expected} == expected
    notes = told(draft)
    assert "--odd 1: is not known" in notes and "--run_name" in notes and "--max_steps" in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('SFTConfig(learning_rate=2e-5)\nAutoModelForImageTextToText.from_pretrained("org/m")',
         ("trl", "sft", "--learning_rate", "2e-05", "--model_name_or_path", "org/m")),
        ("trl.DPOConfig(beta=0.2, loss_type=['sigmoid', 'sft'])", ("trl", "dpo", "--beta", "0.2", "--loss_type",
                                                                  "sigmoid", "sft")),
        ("SFTConfig(seed=n * 2, **more)", ("trl", "sft", "--seed", "$n * 2", "--arguments_of_a_mapping", "more")),
        ("SFTConfig()\nLoraConfig()", ("trl", "sft", "--use_peft", "--lora_r", "8", "--lora_alpha", "8",
                                       "--lora_dropout", "0.0")),
        ("print('no config')", None),
        ("not python at all (", None),
    ],
)  # fmt: skip
def test_the_words_of_a_script(text, words):
    assert words_of_script(text) == words


def test_a_script_without_a_config_is_told_what_to_give(tmp_path):
    with pytest.raises(RecipeError, match=r"does not create a config of TRL"):
        imported(str(written(tmp_path, "import torch\n")))


def test_a_number_that_is_computed_is_named(tmp_path):
    text = SCRIPT.replace("num_generations=4", "num_generations=len(rows)")
    with pytest.raises(RecipeError, match=r"--num_generations \$len\(rows\) is not a number"):
        imported(str(written(tmp_path, text)))


@pytest.mark.parametrize("text", ["x = " + "-" * 100_000 + "1", "x = " + "1 + " * 50_000 + "1",
                                  "SFTConfig(seed=" + "n + " * 600 + "1)", "x" + ".x" * 20_000])  # fmt: skip
def test_code_that_is_nested_too_deeply_is_refused(text):
    with pytest.raises(ValueError, match="its code is nested too deeply"):
        words_of_script(text)

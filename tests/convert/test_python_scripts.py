"""Python scripts that train with TRL."""

import json

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
    assert "starts a process for each GPU" not in notes  # how the script is started is not known
    assert "--odd 1: is not known" in notes and "--run_name" in notes and "--max_steps" in notes


def test_layers_by_a_pattern_stay_as_they_are(tmp_path):
    text = SCRIPT.replace('["q_proj", "v_proj"]', r'r"model\.language_model\..*\.(q_proj|v_proj)"')
    values = drafted(text, written(tmp_path, text)).values
    assert values["lora.targets"] == r"model\.language_model\..*\.(q_proj|v_proj)"


SEVEN = r"(.*\.)?(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
UNSLOTH = """
from unsloth import FastVisionModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastVisionModel.from_pretrained("org/vl", load_in_4bit=True, revision="abc", oddity=1)
model = FastVisionModel.get_peft_model(model, r=32, use_rslora=True, finetune_vision_layers=False, random_state=7)
arguments = SFTConfig("out", learning_rate=2e-4)
arguments.max_steps = 77
trainer = SFTTrainer(model=model, args=arguments, train_dataset=load_dataset(path="org/rows", split="train"))
"""


def test_what_is_said_beside_the_config_is_not_lost(tmp_path):
    """The adapter of Unsloth, arguments of from_pretrained, attributes that are set later, and what has no name."""
    draft = drafted(UNSLOTH, written(tmp_path, UNSLOTH))
    expected = {
        "model.path": "org/vl", "model.revision": "abc", "model.quantize": "nf4", "lora.rank": 32, "lora.alpha": 16.0,
        "lora.kind": "rslora", "output": "out", "train.steps": 77, "data.train": "hf:org/rows:train",
    }  # fmt: skip
    assert {key: draft.values.get(key) for key in expected} == expected
    notes = told(draft)
    assert "--oddity 1" in notes and "--finetune_vision_layers false" in notes and "--random_state 7" in notes


@pytest.mark.parametrize(
    ("given", "targets"),
    (
        ("FastVisionModel.get_peft_model(model, r=32", "all"),
        ("FastVisionModel.get_peft_model(model, r=32, finetune_vision_layers=False", SEVEN),
        ("FastLanguageModel.get_peft_model(model, r=32", SEVEN),
        ('FastVisionModel.get_peft_model(model, target_modules=["q_proj"]', r"(.*\.)?(q_proj)"),
    ),
)
def test_layers_that_unsloth_adapts(tmp_path, given, targets):
    before, after = UNSLOTH.split(
        "FastVisionModel.get_peft_model(model, r=32, use_rslora=True, finetune_vision_layers=False"
    )
    text = f"{before}{given}{after}"
    assert drafted(text, written(tmp_path, text)).values["lora.targets"] == targets


def test_attributes_belong_to_the_config_that_was_made_last(tmp_path):
    text = """
args: SFTConfig = SFTConfig(output_dir="first")
args.max_steps = 1
args = SFTConfig(output_dir="second")
args.max_steps = 2
trainer = SFTTrainer(model="org/vl", args=args, train_dataset=load_dataset("org/rows"))
"""
    values = drafted(text, written(tmp_path, text)).values
    assert (values["output"], values["train.steps"]) == ("first", 1)


def test_later_trainings_and_models_of_a_script_are_named(tmp_path):
    text = f"""{SCRIPT}
reference = AutoModelForCausalLM.from_pretrained("org/other", revision="def")
first = AutoModelForCausalLM.from_pretrained("org/third")
second = SFTConfig(output_dir="later", max_steps=5)
"""
    draft = drafted(text, written(tmp_path, text))
    assert (draft.values["output"], draft.values["model.path"]) == ("out", "org/vl")
    assert "model.revision" not in draft.values  # of another model than the one that is trained
    notes = told(draft)
    assert 'SFTConfig(output_dir="later", max_steps=5)' in notes and "org/other" in notes and "org/third" in notes


LOADED = """
train_ds = load_dataset("org/many", "boxes")["train"]
eval_ds = load_dataset("org/other", split="test")
"""


@pytest.mark.parametrize(
    ("rows", "trained", "train", "spoken"),
    [
        (LOADED, "train_ds", "hf:org/many/boxes:train", 'load_dataset("org/other", split="test")'),
        (LOADED, "eval_ds", "hf:org/other:test", 'load_dataset("org/many", "boxes")'),
        (LOADED, "train_ds.map(f).filter(g)", "hf:org/many/boxes:train", "--load_dataset"),
        # what is evaluated is not trained on, even where the training rows are not found
        ('eval_ds = load_dataset("org/other")\nrows = load_dataset("org/a")', "unknown", "hf:org/a:train",
         'load_dataset("org/other")'),
        ('eval_ds = load_dataset("org/other")\nbuilt = Dataset.from_list([])', "built", None, "--load_dataset"),
        ('both = load_dataset("org/a")\neval_ds = both["test"]', 'both["train"]', "hf:org/a:train", ""),
        ('both = load_dataset("org/a", split="train[:9]").train_test_split(0.1)\nx, y = both["train"], both["test"]',
         "x", "hf:org/a:train[:9]", ""),
        ('def read():\n    rows = load_dataset("org/a", split="b")\n    return rows', "read()", "hf:org/a:b", ""),
        ('rows: object = load_dataset("json", data_files="t.jsonl", split="train")', "rows", "t.jsonl", ""),
        ('rows = load_dataset("parquet", None, None, ["t.parquet"], split="train")', "rows", "t.parquet", ""),
        ('rows = load_dataset("json", data_files="t.jsonl", split="train[:5%]")', "rows", "t.jsonl",
         "--dataset_train_split train[:5%]: t.jsonl has no splits"),
        ('rows = load_dataset("json", data_files={"train": "t.jsonl"})', "rows", None, "--data_files"),
        ('rows = load_dataset("json", data_files=named)', "rows", None, "--data_files named: "),
        ('rows = load_dataset("org/a", data_dir="part", split="train")', "rows", "hf:org/a:train", "--data_dir"),
        ('rows = load_dataset("org/a")[part]', "rows", "hf:org/a:$part", "--dataset_train_split $part"),
    ],
)  # fmt: skip
def test_rows_are_those_that_the_trainer_trains_on(tmp_path, rows, trained, train, spoken):
    text = f"{rows}\nSFTTrainer(model='org/m', args=SFTConfig(), train_dataset={trained}, eval_dataset=eval_ds)"
    draft = drafted(text, written(tmp_path, text))
    assert draft.values.get("data.train") == train
    assert spoken in told(draft) and ("--load_dataset" in told(draft)) == ("load_dataset" in spoken)


CHANGED = """
processor = AutoProcessor.from_pretrained("org/m", max_pixels=512 * side * 28, padding_side="left")
side = 28
rows = load_dataset("org/rows", split="train")
rows = rows.train_test_split(test_size=0.2, seed=42)
train, test = rows["train"], rows["test"]
train = train.map(make_conversation).filter(lambda row: row["image"].size[0] < 512).map(further).shuffle(seed=3)
random.shuffle(names)
lengths = list(map(len, names))
SFTTrainer("org/m", args=SFTConfig(eval_strategy="steps"), train_dataset=train.select(range(9)), eval_dataset=test,
           formatting_func=written, data_collator=Collator(processor))
"""


def test_what_a_script_does_to_its_rows_is_told(tmp_path):
    draft = drafted(CHANGED, written(tmp_path, CHANGED))
    expected = {"data.train": "hf:org/rows:train", "data.eval": {"fraction": 0.2}, "model.max_pixels": 401408}
    assert {key: draft.values.get(key) for key in expected} == expected
    changes = {note.subject for note in draft.notes if note.is_change}
    assert changes >= {
        "--dataset.map make_conversation further",
        """--dataset.filter 'lambda row: row["image"].size[0] < 512'""",
        "--dataset.shuffle 3",
        "--dataset.select range(9)",
        "--formatting_func written",
        "--data_collator Collator(processor)",
    }
    assert "names" not in told(draft) and "--eval_dataset" not in told(draft)


@pytest.mark.parametrize(
    ("rows", "held", "spoken"),
    [
        ("rows.train_test_split(0.1)", {"fraction": 0.1}, ""),
        ("rows.train_test_split(test_size=100)", {"count": 100}, ""),
        ("rows.train_test_split(train_size=0.9)", {"fraction": 0.1}, ""),
        ("rows.train_test_split()", {"fraction": 0.25}, ""),  # datasets' default
        ("rows.train_test_split(test_size=n)", None, "--dataset.train_test_split test_size=n: "),
        ("rows.train_test_split(train_size=500)", None, "--dataset.train_test_split train_size=500: "),
        ("SFTTrainer(eval_dataset=rows)", None, "--eval_dataset rows: rows that a Python script evaluates"),
        ("both = load_dataset('a/b')\nSFTTrainer(train_dataset=both['train'], eval_dataset=both['val'])",
         "hf:a/b:val", ""),
        ("pass", None, ""),  # no split is invented
    ],
)  # fmt: skip
def test_rows_that_a_script_holds_out(tmp_path, rows, held, spoken):
    text = f"SFTConfig(eval_strategy='steps')\n{rows}"
    text = text if "load_dataset" in text else f"rows = load_dataset('org/rows')\n{text}"
    draft = drafted(text, written(tmp_path, text))
    assert draft.values.get("data.eval") == held and spoken in told(draft)


def test_four_bits_are_of_the_kind_that_transformers_takes(tmp_path):
    text = "BitsAndBytesConfig(load_in_4bit=True)\nSFTTrainer('org/m', args=SFTConfig())"
    draft = drafted(text, written(tmp_path, text))
    assert "model.quantize" not in draft.values and draft.values["model.path"] == "org/m"
    assert "--bnb_4bit_quant_type fp4: has no equivalent: model.quantize is nf4 or int8" in told(draft)


@pytest.mark.parametrize("name", ["'imdb'", "given.dataset_name"])
def test_only_a_file_has_no_splits(tmp_path, name):
    text = f"SFTTrainer('org/m', args=SFTConfig(), train_dataset=load_dataset({name}, split='part'))"
    assert "has no splits" not in told(drafted(text, written(tmp_path, text)))


def test_names_that_stand_for_each_other_are_looked_up_once():
    lines = [f"a{number} = f(a{number + 1}, a{number + 1}, a{number})" for number in range(60)]
    text = "\n".join(["SFTTrainer(train_dataset=a0, args=SFTConfig())", *lines])
    assert words_of_script(text) == ("trl", "sft")


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
        ('model_id = "org/m"\nQwen2_5_VLForConditionalGeneration.from_pretrained(model_id)\nSFTConfig()',
         ("trl", "sft", "--model_name_or_path", "org/m")),
        ('transformers.LlavaForCausalLM.from_pretrained("org/m")\nSFTConfig()',
         ("trl", "sft", "--model_name_or_path", "org/m")),
        ('AutoProcessor.from_pretrained("org/p")\nSFTTrainer("org/m", args=SFTConfig())',
         ("trl", "sft", "--model_name_or_path", "org/m")),
        ("SFTTrainer(model, args=SFTConfig())", ("trl", "sft")),
        ("SFTConfig()\nBitsAndBytesConfig(load_in_4bit=True)",
         ("trl", "sft", "--load_in_4bit", "true", "--bnb_4bit_quant_type", "fp4")),
        ('SFTConfig()\nBitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
         ("trl", "sft", "--load_in_4bit", "true", "--bnb_4bit_quant_type", "nf4")),
        ("SFTConfig()\nBitsAndBytesConfig(load_in_8bit=True)", ("trl", "sft", "--load_in_8bit", "true")),
        ('a, *b = "org/m", "x", "y"\nSFTTrainer(a, args=SFTConfig())', ("trl", "sft", "--model_name_or_path", "org/m")),
        ("*a, b = 1, 2, 3\nSFTConfig(seed=b, max_steps=a)", ("trl", "sft", "--seed", "3", "--max_steps", "1", "2")),
        ("[a, (b, *c)] = 1, (2, 3)\nSFTConfig(seed=a, max_steps=b)", ("trl", "sft", "--seed", "1", "--max_steps", "2")),
        ("a, *b = '57'\nSFTConfig(seed=a)", ("trl", "sft", "--seed", "a")),
        ("a, b, c = *rest, 1\nSFTConfig(seed=a, max_steps=c)", ("trl", "sft", "--seed", "a", "--max_steps", "c")),
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


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [("tools=[multiply]", "rollout.tools"), ("environment_factory=Maze", "rollout.environment"),
     ("rollout_func=play", "rollout.environment or rollout.tools")],
)  # fmt: skip
def test_what_answers_the_policy_is_refused_and_not_left_out(tmp_path, argument, nearest):
    """As in TRL's own example of tools; the recipe sampled a single turn without them."""
    text = SCRIPT.replace("reward_funcs=", f"{argument}, reward_funcs=")
    with pytest.raises(RecipeError, match=rf"--{argument.partition('=')[0]} .* nearest: {nearest}"):
        imported(str(written(tmp_path, text)))


def test_other_arguments_of_a_trainer_are_told(tmp_path):
    arguments = "ref_model=other, optimizers=(a, None), oddity=f(1), compute_metrics=None"
    text = SCRIPT.replace("reward_funcs=", f"{arguments}, reward_funcs=")
    notes = told(drafted(text, written(tmp_path, text)))
    assert "--ref_model other: the KL reference" in notes and "--optimizers '(a, None)': an optimiser" in notes
    assert "--oddity f(1): is not known" in notes and "compute_metrics" not in notes


GKD = """
teacher = AutoModelForCausalLM.from_pretrained("org/large", revision="abc")
model = AutoModelForCausalLM.from_pretrained("org/small")
trainer = GKDTrainer(model=model, teacher_model=teacher, args=GKDConfig(output_dir="out"), train_dataset=rows)
"""


@pytest.mark.parametrize(
    ("text", "revision"), [(GKD, "abc"), (GKD.replace("teacher_model=teacher", 'teacher_model="org/large"'), None)]
)
def test_the_model_and_the_teacher_are_those_of_the_trainer(tmp_path, text, revision):
    """In TRL's example of GKD; it was refused as a student without a teacher."""
    values = drafted(text, written(tmp_path, text)).values
    assert (values["model.path"], values["teacher.path"]) == ("org/small", "org/large")
    assert values.get("teacher.revision") == revision and "model.revision" not in values


EARLY = """
model, tokenizer = FastVisionModel.from_pretrained("org/vl", load_in_4bit=True)
model = FastVisionModel.get_peft_model(model, r=16)
trainer = DPOTrainer(
    model=model, ref_model=None, beta=0.3, max_length=1024, tokenizer=tokenizer,
    train_dataset=load_dataset("org/pairs"),
    args=TrainingArguments(output_dir="out", fp16=not is_bf16_supported(), bf16=is_bf16_supported(), max_steps=60),
)
"""


def test_a_trainer_of_early_scripts_with_its_own_arguments(tmp_path):
    """As in Unsloth 2752: plain TrainingArguments, and the method's arguments beside them."""
    draft = drafted(EARLY, written(tmp_path, EARLY))
    expected = {
        "model.path": "org/vl", "model.quantize": "nf4", "model.dtype": "bfloat16", "dpo.beta": 0.3, "train.steps": 60,
        "data.max_prompt_tokens": 1024, "optim.lr": 5e-5, "lora.rank": 16, "output": "out",
    }  # fmt: skip
    assert {key: draft.values.get(key) for key in expected} == expected and draft.launch.kind == "dpo"
    text = EARLY.replace("DPOTrainer", "Trainer")
    assert words_of_script(text) is None  # which does not say what it trains


def test_an_adapter_that_a_script_loads_is_told(tmp_path):
    """As TRL 3684 recommends it."""
    text = SCRIPT.replace("trainer =", 'base = AutoModelForCausalLM.from_pretrained("org/base")\n'
                          'model = PeftModel.from_pretrained(base, "sft", is_trainable=True)\ntrainer =')  # fmt: skip
    text = text.replace("model=MODEL", "model=model")
    draft = drafted(text, written(tmp_path, text))
    assert draft.values["model.path"] == "org/base"
    assert "an adapter that a Python script loads; nearest is lora.init" in told(draft)


def test_a_notebook_is_a_script(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# GRPO(", "with TRL"]},
        {"cell_type": "code", "source": "%%bash\npip install trl; if then fi"},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install trl\n", "if True:\n", "    !pip install vllm\n"]},
        {"cell_type": "code", "source": "!pip install a \\\n  b\nfiles = %sx ls\nx.y = !ls\nGRPOConfig?\n" + SCRIPT},
        {"cell_type": "code", "source": "for each in !ls:\n    pass"},
    ]
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert drafted(file.read_text(), file).values == drafted(SCRIPT, written(tmp_path, SCRIPT)).values
    file.write_text('{"cells": 3}')
    with pytest.raises(RecipeError, match="is not a notebook"):
        imported(str(file))


NOTEBOOK = """
model, tokenizer = FastVisionModel.from_pretrained("org/vl", max_seq_length=4096)
model = FastVisionModel.get_peft_model(model, bias="none", loftq_config=None)
SFTTrainer(model=model, tokenizer=tokenizer, args=SFTConfig(output_dir="out", bf16=is_bf16_supported()))
"""


def test_an_unsloth_script_of_sft(tmp_path):
    """As Unsloth's notebooks; its rows had the 1024 tokens of TRL's default."""
    draft = drafted(NOTEBOOK, written(tmp_path, NOTEBOOK))
    assert draft.values["data.max_prompt_tokens"] == 4096
    assert "is not known" not in told(draft) and "holds what only the script knows" in told(draft)
    text = NOTEBOOK.replace('"out",', '"out", max_length=2048,')
    assert drafted(text, written(tmp_path, text)).values["data.max_prompt_tokens"] == 2048

"""LLaMA-Factory's YAML files, and the data sets that they name."""

import json
from pathlib import Path

import pytest

from tests.convert.helpers import drafted, told, values_of
from tiercel.cli.import_command import imported
from tiercel.errors import RecipeError

RECIPE = """### model
model_name_or_path: org/vl
image_max_pixels: 262144
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: boxes,notes  # two
max_samples: 100
cutoff_len: 1024
learning_rate: 1.0e-4
resume_from_checkpoint: null
max_steps: null
report_to: [wandb, swanlab]
gradient_checkpointing_kwargs: {use_reentrant: false}
"""
SETS = {
    "boxes": {"file_name": "boxes.json", "formatting": "sharegpt", "columns": {"messages": "messages"},
              "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"}},
    "notes": {"file_name": "notes.jsonl", "num_samples": 50},
    "tools": {"file_name": "tools.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
    "hub": {"hf_hub_url": "org/rows", "subset": "v2", "split": "test", "ranking": True},
    "both": {"hf_hub_url": "org/rows", "ms_hub_url": "ms/rows"},
    "there": {"ms_hub_url": "ms/rows"},
    "script": {"script_url": "own_script"},
    "inside": {"file_name": "sub/rows.json"},
    "swapped": {"file_name": "rows.json", "columns": {"system": "instruction", "prompt": "input"}},
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(SETS))
    (tmp_path / "train.yaml").write_text(RECIPE)
    return tmp_path


def test_a_file_with_overrides(home):
    draft = drafted(
        "NPROC_PER_NODE=4 llamafactory-cli train train.yaml learning_rate=2e-5 lora_target=all dataset=notes"
    )
    expected = {
        "model.path": "org/vl",
        "model.max_pixels": 262144,
        "lora.targets": "language",
        "optim.lr": 2e-5,
        "optim.prompts_per_step": 32,
        "data.train": "data/notes.jsonl#50",
        "data.max_prompt_tokens": 1024,
        "train.epochs": 3,
        "trackers": ["wandb", "swanlab"],
    }
    assert {key: draft.values.get(key) for key in expected} == expected
    assert "llamafactory-cli: starts a process" not in told(draft)


def test_the_file_itself(home):
    draft = drafted(RECIPE, home / "train.yaml")
    assert draft.values["lora.targets"] == r"(.*\.)?(q_proj|v_proj)" and "layers of frozen parts" in told(draft)
    assert draft.values["data.mix"] == [{"path": "data/notes.jsonl#50", "weight": 0.5}]
    assert "llamafactory-cli: starts a process for each GPU that it sees" in told(draft)
    assert "--resume_from_checkpoint null" in told(draft) and "--max_steps null" in told(draft)
    text, problems = imported(str(home / "train.yaml"))
    assert "# Made from a command of LLaMA-Factory" in text
    told_packages = {"trackers"}  # if they are not installed
    assert {problem.partition(":")[0] for problem in problems} <= {"data.train", "data.mix.0.path"} | told_packages


@pytest.mark.parametrize(("gpus", "is_change", "named"), [(0, True, "no GPU"), (1, False, "1 GPU"), (4, True, "by 4")])
def test_processes_are_a_matter_of_the_machine(home, monkeypatch, gpus, is_change, named):
    devices = home / "dev"
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (devices / name).touch()
    monkeypatch.setattr("tiercel.convert.conversion._DEVICES", devices)
    note = next(note for note in drafted(RECIPE, home / "train.yaml").notes if note.subject == "llamafactory-cli")
    assert note.is_change == is_change and named in note.text


@pytest.mark.parametrize(
    ("frozen", "targets", "spoken"),
    [
        ("freeze_multi_modal_projector=false", "language", "of most models the projector gets no adapters"),
        ("freeze_vision_tower=false freeze_multi_modal_projector=false", "all", "of most models the projector gets"),
        ("freeze_vision_tower=false", "all", "only vision and language in LLaMA-Factory"),
        ("freeze_multi_modal_projector=false freeze_language_model=true", "projector", ""),
    ],
)
def test_all_linear_layers_of_what_is_not_frozen(home, frozen, targets, spoken):
    draft = drafted(f"llamafactory-cli train train.yaml lora_target=all {frozen}")
    assert draft.values["lora.targets"] == targets and spoken in told(draft)


def test_the_projector_alone(home):
    line = "llamafactory-cli train --do_train --stage sft --model_name_or_path m --finetuning_type full --dataset notes"
    draft = drafted(f"{line} --train_mm_proj_only true")
    assert draft.values["freeze"] == ["vision", "language"] and "train_mm_proj_only" not in told(draft)


@pytest.mark.parametrize(
    ("limit", "train", "spoken"),
    [(2, "data/there.json#2", ""), (3, "data/there.json", "has 3 rows, so all are taken"),
     (100, "data/there.json", "has 3 rows, so all are taken")],
)  # fmt: skip
def test_max_samples_is_at_most(home, limit, train, spoken):
    (home / "data" / "there.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * 3))
    (home / "data" / "dataset_info.json").write_text(json.dumps({"there": {"file_name": "there.json"}}))
    line = f"llamafactory-cli train --do_train --model_name_or_path org/m --dataset there --max_samples {limit}"
    draft = drafted(line)
    assert draft.values["data.train"] == train and spoken in told(draft)
    assert "takes at most so many rows" not in told(draft)
    (home / "data" / "there.json").unlink()
    assert "LLaMA-Factory takes at most so many rows, tiercel exactly so many" in told(drafted(line))


@pytest.mark.parametrize(
    ("flag", "missing"),
    [("--quantization_bit 4", "model.quantize: needs the package bitsandbytes"),
     ("--deepspeed ds_z3_config.json", "train.strategy: needs the package deepspeed"),
     ("--report_to wandb --optim adamw_8bit", "trackers: wandb is not installed")],
)  # fmt: skip
def test_packages_that_are_missing_are_named_at_the_end(home, monkeypatch, flag, missing):
    for module in ("convert.manual_steps", "config.tracker_packages"):
        monkeypatch.setattr(f"tiercel.{module}.find_spec", lambda name: None)
    left = drafted(f"llamafactory-cli train --do_train --model_name_or_path org/m --dataset notes {flag}").left
    assert any(line.startswith(missing) and "pip install " in line for line in left)


def test_another_yaml_file_is_no_command(home):
    (home / "other.yaml").write_text("num_processes: 4\n")
    with pytest.raises(RecipeError, match="does not say which program reads these settings; give the command"):
        imported(str(home / "other.yaml"))


@pytest.mark.parametrize(
    ("name", "train", "spoken"),
    [
        ("boxes", "data/boxes.json", ""),
        ("notes", "data/notes.jsonl#50", ""),
        ("tools", "data/tools.json", "talk, tools: docs/data.md says which columns are read"),
        ("hub", "hf:org/rows/v2:test", ""),
        ("both", "hf:org/rows:train", ""),
        ("there", "hf:ms/rows:train", "an id of ModelScope"),
        ("script", "data/own_script", "own_script is no file of rows that tiercel reads"),
        (
            "swapped",
            "data/rows.json",
            "system: instruction, prompt: input: tiercel reads columns of these names with another meaning",
        ),
        ("none", "none", "has no such entry; write the file that it names"),
    ],
)
def test_a_data_set_by_its_entry(home, name, train, spoken):
    draft = drafted(f"llamafactory-cli train --do_train --model_name_or_path org/m --dataset {name}")
    assert draft.values["data.train"] == train
    assert spoken in told(draft) and (f"--dataset {name}: " in told(draft)) == bool(spoken)


def test_pictures_start_in_the_folder_of_all_data_sets(home):
    line = "llamafactory-cli train --do_train --model_name_or_path org/m --dataset"
    assert drafted(f"{line} inside").values["data.image_root"] == "data"
    assert "data.image_root" not in drafted(f"{line} boxes").values


def test_files_may_begin_with_a_byte_order_mark(home):
    (home / "data" / "dataset_info.json").write_text(json.dumps(SETS), encoding="utf-8-sig")
    (home / "train.yaml").write_text(RECIPE, encoding="utf-8-sig")
    text = imported(str(home / "train.yaml"))[0]
    assert "data/boxes.json" in text and "org/vl" in text


def test_where_data_sets_are_described():
    line = "llamafactory-cli train --do_train --model_name_or_path org/m --dataset org/a,org/b"
    assert values_of(f"{line} --dataset_dir ONLINE --max_samples 10")["data.train"] == "hf:org/a#10"
    draft = drafted(f"{line} --dataset_dir REMOTE:org/sets --media_dir pictures")
    assert draft.values["data.train"] == "org/a" and draft.values["data.image_root"] == "pictures"
    assert "REMOTE:org/sets/dataset_info.json is not on this machine" in told(draft)


def test_shares_and_held_out_rows(home):
    line = "llamafactory-cli train --do_train --model_name_or_path org/m --dataset boxes,notes"
    draft = drafted(f"{line} --mix_strategy interleave_under --interleave_probs 0.8,0.2 --eval_dataset hub,notes")
    assert draft.values["data.mix"] == [{"path": "data/notes.jsonl#50", "weight": 0.25}]
    assert draft.values["data.eval"] == "hf:org/rows/v2:test" and "data.eval is one file" in told(draft)
    assert values_of(f"{line} --val_size 20")["data.eval"] == {"count": 20}
    assert values_of(f"{line} --val_size 0.1 --eval_strategy steps --eval_steps 5")["train.eval_every"] == 5
    without = f"{line} --val_size 0.1 --eval_strategy steps --save_steps 70"
    assert values_of(f"{without} --logging_steps 7")["train.eval_every"] == 7  # as transformers does
    assert values_of(without)["train.eval_every"] == 500

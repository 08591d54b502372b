"""Data sets, system messages, templates, limits."""

import pytest

from tests.convert.helpers import DPO, GRPO, REC, SFT, TRL, drafted, told, values_of


@pytest.mark.parametrize(
    ("word", "train", "spoken"),
    [
        ("rows.jsonl#100", "rows.jsonl#100", ""),
        ("org/rows", "hf:org/rows", "an id of ModelScope"),
        ("org/rows:human#20", "hf:org/rows/human#20", "an id of ModelScope"),
        ("HF::org/rows#20", "hf:org/rows#20", ""),
        ("data/rows.csv", "data/rows.csv", "is no file of rows that tiercel reads"),
        ("/abs/rows.json", "/abs/rows.json", ""),
    ],
)
def test_a_data_set_of_ms_swift(word, train, spoken):
    draft = drafted(f"swift sft --model org/m --dataset '{word}'")
    assert draft.values["data.train"] == train
    assert spoken in told(draft) and ("ModelScope" in told(draft)) == ("ModelScope" in spoken)


GKD = "swift rlhf --rlhf_type gkd --model org/m --teacher_model org/t --dataset r.jsonl"
BEFORE, WHILE = "--dataset_shuffle false", "--train_dataloader_shuffle false"


@pytest.mark.parametrize(
    ("line", "shuffle"),
    [
        (f"{SFT} {BEFORE}", True), (f"{SFT} {WHILE}", True), (f"{SFT} {BEFORE} {WHILE}", False), (SFT, None),
        (f"{SFT} {BEFORE} --train_dataloader_shuffle true", True), (f"{DPO} {BEFORE}", True),
        (f"{GRPO} {BEFORE}", False), (f"{GRPO} {WHILE}", None), (f"{GKD} {BEFORE} {WHILE}", None),
    ],
)  # fmt: skip
def test_ms_swift_shuffles_twice(line, shuffle):
    draft = drafted(line)
    assert draft.values.get("data.shuffle") is shuffle
    if shuffle and "false" in line:
        still = "train_dataloader_shuffle" if BEFORE in line else "dataset_shuffle"
        assert draft.origins["data.shuffle"].remark.startswith(f"ms-swift shuffles by --{still}; ")
    given = {label for label in draft.given if "shuffle" in label}
    spoken = {label for note in draft.notes for label in note.labels}
    set_by = {label for origin in draft.origins.values() for label in origin.labels}
    assert given <= spoken | set_by


def test_several_data_sets_weigh_their_rows():
    draft = drafted("swift sft --model org/m --use_hf true --dataset 'org/a#5000' 'org/b:x#2500'")
    assert draft.values["data.mix"] == [{"path": "hf:org/b/x#2500", "weight": 0.5}]
    assert "end to end" not in told(draft)


def test_rows_of_files_that_are_here_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n{}\n{}\n{}\n")
    (tmp_path / "b.jsonl").write_text("{}\n\n")
    assert values_of("swift sft --model m --dataset a.jsonl b.jsonl")["data.mix"] == [
        {"path": "b.jsonl", "weight": 0.25}
    ]


def test_files_whose_rows_are_unknown_are_told():
    draft = drafted("swift sft --model m --dataset a.jsonl b.jsonl")
    assert draft.values["data.mix"] == [{"path": "b.jsonl", "weight": 1.0}]
    assert "equal parts until data.mix.N.weight is set" in told(draft)
    draft = drafted("swift sft --model m --dataset a.jsonl b.jsonl --interleave_prob 0.8 0.2")
    assert draft.values["data.mix"] == [{"path": "b.jsonl", "weight": 0.25}]
    assert "ms-swift ends an epoch with the first exhausted file" in told(draft)


def test_files_and_folders_of_vlm_r1_with_colons_between():
    line = "python grpo_jsonl.py --model_name_or_path m/m --data_file_paths a.jsonl:b.jsonl --image_folders x:y"
    draft = drafted(line)
    assert draft.values["data.train"] == "a.jsonl" and draft.values["data.image_root"] == "x"
    assert draft.values["data.mix"] == [{"path": "b.jsonl", "weight": 1.0, "image_root": "y"}]
    odd = drafted(line.replace("x:y", "x:y:z"))
    assert "data.image_root" not in odd.values and "not one folder for each file" in told(odd)


def test_a_name_that_is_not_read_does_not_come_before_the_files():
    draft = drafted(f"{REC} --dataset-name this_is_not_used --run_name mine --output_dir out")
    assert draft.values["data.train"] == "a.jsonl" and draft.values["output"] == "out"
    assert "this_is_not_used: is not read" in told(draft) and "--run_name mine" in told(draft)


def test_a_list_of_files_of_vlm_r1_is_read_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rec.yaml").write_text("datasets:\n  - json_path: a.json\n  - json_path: b.json\n")
    line = "python grpo_rec.py --model_name_or_path org/Qwen2-VL --dataset_name rec.yaml --image_root pictures"
    values = values_of(line)
    assert values["data.train"] == "a.json" and values["data.image_root"] == "pictures"
    assert values["data.mix"] == [{"path": "b.json", "weight": 1.0}]
    (tmp_path / "rec.yaml").unlink()
    assert "the list of files is not on this machine" in told(drafted(line))


@pytest.mark.parametrize(
    ("flags", "train", "held_out"),
    [
        ("--dataset_name org/mix", "hf:org/mix:train", None),
        ("--dataset_name org/mix --dataset_config sub --dataset_train_split test", "hf:org/mix/sub:test", None),
        ("--dataset_name org/mix --eval_strategy steps --eval_steps 5", "hf:org/mix:train", "hf:org/mix:test"),
        ("--dataset_name rows.jsonl", "rows.jsonl", None),
    ],
)
def test_a_data_set_of_trl(flags, train, held_out):
    values = values_of(f"trl sft --model_name_or_path m {flags}")
    assert (values["data.train"], values.get("data.eval")) == (train, held_out)


def test_what_a_script_of_trl_decides_itself():
    draft = drafted("accelerate launch x/gspo_vlm.py --model_name_or_path org/m --use_peft")
    assert draft.values["data.train"] == "hf:lmms-lab/multimodal-open-r1-8k-verified:train"
    assert draft.values["data.eval"] == {"count": 100} and "<think>" in draft.values["data.system"]
    assert [reward["name"] for reward in draft.values["rewards"]] == ["format", "math"]
    assert "512 pixels" in told(draft)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--split_dataset_ratio 0.01", "data.eval", {"fraction": 0.01}),
        ("--split_dataset_ratio 0", "data.eval", None),
        ("--val_dataset held.jsonl#50", "data.eval", "held.jsonl#50"),
        ("--loss_scale last_round", "data.train_turns", "last"),
        ("--max_length 2048", "data.max_prompt_tokens", 2048),
    ],
)
def test_what_is_done_with_rows(flags, key, value):
    assert values_of(f"{SFT} {flags}").get(key) == value


def test_a_system_message_that_is_a_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "think.txt").write_text("Think: first,\nthen answer.\n")
    line = f"{GRPO} --system think.txt"
    assert values_of(line, tmp_path / "deep" / "run.sh")["data.system"] == "Think: first,\nthen answer."
    monkeypatch.chdir(tmp_path)
    assert values_of(line)["data.system"] == "Think: first,\nthen answer."
    (tmp_path / "think.txt").unlink()
    draft = drafted(line)
    assert "data.system" not in draft.values and "put its text into data.system" in told(draft)
    assert values_of(f"{GRPO} --system 'You answer.'")["data.system"] == "You answer."


@pytest.mark.parametrize(
    ("line", "has_json"),
    [
        (f"{REC} --task_type rec", True),
        (f"{REC} --task_type gui", False),
        (f"{REC} --task_type rec".replace("Qwen2-VL", "InternVL2"), False),
    ],
)
def test_the_question_of_vlm_r1_asks_for_the_tags_that_its_rewards_need(line, has_json):
    prompt = values_of(line)["data.prompt"]
    assert "{prompt}" in prompt and "<think> </think>" in prompt and "<answer> </answer>" in prompt
    assert ("JSON" in prompt) == has_json


def test_what_happens_to_long_rows_is_told():
    assert "ms-swift cuts a longer row" in told(drafted(f"{GRPO} --max_length 100"))
    assert "a longer row is left out, as in tiercel" in told(drafted(f"{SFT} --max_length 100"))
    assert "TRL has no limit" in told(drafted(TRL))


@pytest.mark.parametrize(
    ("given", "columns", "spoken"),
    [
        ('{"text1": "query", "pic": "images", "label": "label"}', {"query": "text1", "images": "pic"}, ""),
        ('{"q": "question"}', {"question": "q"}, ""),
        ('{"label": "label"}', None, "gives no column another name"),
        ('{"text1": 3}', None, "is no JSON object of names; write data.columns"),
        ("text1:query", None, "is no JSON object of names; write data.columns"),
    ],
)
def test_columns_of_ms_swift_are_named_the_other_way_round(given, columns, spoken):
    draft = drafted(f"{SFT} --columns '{given}'")
    assert draft.values.get("data.columns") == columns
    assert spoken in told(draft) and ("--columns" in told(draft)) == bool(spoken)


def test_variables_of_the_chat_template_are_imported(tmp_path):
    key = "data.template_arguments"
    for text in ('{"enable_thinking": false}', "{enable_thinking: false}"):
        assert values_of(f"{TRL} --chat_template_kwargs '{text}'")[key] == {"enable_thinking": False}
    (tmp_path / "trl.yaml").write_text("dataset_name: r.jsonl\nchat_template_kwargs: {enable_thinking: false}\n")
    line = "trl grpo --model_name_or_path org/m --config trl.yaml"
    assert values_of(line, tmp_path / "run.sh")[key] == {"enable_thinking": False}
    with pytest.raises(ValueError, match="--chat_template_kwargs no is not a mapping"):
        values_of(f"{TRL} --chat_template_kwargs no")
    assert values_of(f"{GRPO} --enable_thinking false")[key] == {"enable_thinking": False}
    assert key not in values_of(f"{GRPO} --enable_thinking true")

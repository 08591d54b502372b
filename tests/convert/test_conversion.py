"""Whole commands of each peer, and what is refused."""

import pytest

from tests.convert.helpers import drafted, told
from tests.convert.shapes import SHAPES, SWIFT, SWIFT_ARRAY, SWIFT_SFT, TRL, VLM_R1
from tiercel.cli.import_command import import_command, imported
from tiercel.cli.main import main
from tiercel.config import load_recipe
from tiercel.errors import RecipeError


def test_a_command_of_ms_swift():
    draft = drafted(SWIFT)
    values = draft.values
    expected = {
        "model.path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "model.dtype": "bfloat16",
        "model.max_pixels": 1003520,
        "lora.rank": 16,
        "lora.alpha": 64,
        "lora.dropout": 0.0,
        "lora.targets": "language",
        "data.train": "rows.jsonl#1000",
        "data.max_prompt_tokens": 4096,
        "rollout.max_new_tokens": 1024,
        "rollout.group_size": 8,
        "rollout.engine": "vllm",
        "rollout.vllm.tensor_parallel": 2,
        "rollout.vllm.gpu_memory_utilization": 0.4,
        "rollout.resample_tries": 5,
        "algorithm.loss": "dapo",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.place": "reward",
        "algorithm.kl.estimator": "k1",
        "algorithm.advantage": "reinforce_pp_baseline",
        "algorithm.overlong": "mask",
        "optim.lr": 1e-5,
        "optim.schedule": "cosine",
        # 4 x 8 x 4 = 128 completions in a rollout, 4 x 8 x 2 = 64 in an update
        "optim.prompts_per_step": 16,
        "optim.minibatches": 2,
        "optim.warmup_steps": 4,  # 0.05 of 1000 rows / 16
        "train.epochs": 1,
        "train.strategy": "deepspeed",
        "train.deepspeed.stage": 3,
        "train.save_every": 50,  # 100 updates, 2 in a step
        "train.keep": 2,
        "train.log_every": 2,
        "trackers": ["wandb"],
        "output": "output/grpo",
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["rewards"] == [
        {"call": "plugin.py:external_count", "weight": 1.0},
        {"name": "format", "pattern": r"<think>.*</think>\s*<answer>.*</answer>", "weight": 0.5},
    ]
    spoken = told(draft)
    for flag in ("--no_such_flag", "--attn_impl", "--lora_dropout", "--external_plugins"):
        assert flag in spoken
    assert "train.steps" not in values and "algorithm.scale" not in values


def test_an_sft_command_of_ms_swift():
    values = drafted(SWIFT_SFT).values
    expected = {
        "lora.targets": "language",
        "data.eval": {"fraction": 0.01},
        "data.mix": [{"path": "hf:org/chat#10000", "weight": 2.0}],
        "data.workers": 4,
        "data.video.fps": 1,
        "model.max_pixels": 1024 * 32 * 32,
        "optim.prompts_per_step": 16,  # 1 x 2 x 8
        "learner.gradient_checkpointing": True,
        "train.eval_every": 100,
        "trackers": ["tensorboard", "swanlab"],
    }
    assert {key: values.get(key) for key in expected} == expected
    assert not [key for key in values if key.startswith(("rollout.", "algorithm.", "rewards"))]


def test_a_command_in_arrays_and_arithmetic():
    values = drafted(SWIFT_ARRAY).values
    expected = {
        "data.train": "my rows.jsonl",
        "optim.lr": 3e-5,
        "rollout.max_new_tokens": 300,
        "output": "runs/imported",
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["optim.prompts_per_step"] == 1  # 16/4 x 4/2 completions / 8


def test_a_command_of_vlm_r1():
    values = drafted(VLM_R1).values
    expected = {
        "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "model.dtype": "bfloat16",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.0,
        "lora.targets": "language",
        "data.train": "refcoco.jsonl",
        "data.image_root": "coco",
        "optim.prompts_per_step": 16,  # 8 x 8 x 2 completions / 8
        "algorithm.kl.coef": 0.04,
        "train.steps": 600,
        "train.deepspeed.stage": 3,
        "rollout.top_k": 50,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["output"] == "checkpoints/qwen-rec-lora"
    assert values["rewards"][0] == {"name": "vlm_r1_rec"} and values["rewards"][1]["name"] == "format"
    assert "optim.minibatches" not in values and "train.epochs" not in values


def test_a_command_of_trl():
    values = drafted(TRL).values
    expected = {
        "optim.prompts_per_step": 8,  # 4 x 4 x 2 completions / 4
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 512,
        "rollout.engine": "vllm-server",
        "rollout.urls": ["http://127.0.0.1:8001"],
        "algorithm.loss": "cispo",
        "algorithm.scale": "none",
        "algorithm.overlong": "mask",
        "optim.rollout_epochs": 2,
        "train.steps": 100,
        "optim.warmup_steps": 10,
        "optim.schedule": "linear",
        "lora.rank": 16,
    }
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", SHAPES)
def test_the_text_is_a_recipe_but_for_paths(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text(SHAPES[name])
    import_command(str(tmp_path / "launch.sh"), tmp_path / "recipe.yaml")
    told = capsys.readouterr().err.splitlines()
    left = [line for line in told if "needs the package" not in line and "not installed" not in line]
    allowed = (
        "data.train",
        "data.mix",
        "data.image_root",
        "rewards",
        "lora.init",
        "model.hub",
        "teacher.hub",
        "--data",
    )
    assert [line for line in left if not line.removeprefix("still to do: ").startswith(allowed)] == []


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("runs/$(date +%F)", "runs/imported"),
        ('"$HOME/out/first"', "out/first"),
        ("$(cd $(dirname $0)/.. && pwd)/checkpoints/rec", "checkpoints/rec"),
        ("/data/out/$NAME/seed$SEED", "/data/out/imported"),
        ("out-$NAME", "runs/imported"),
        ("$ROOT/..", "runs/imported"),
        ("$ROOT/", "runs/imported"),
    ],
)
def test_an_output_holds_nothing_that_only_the_shell_knows(given, output):
    draft = drafted(f"swift rlhf --rlhf_type grpo --model m --dataset rows.jsonl --output_dir {given}")
    assert draft.values["output"] == output
    assert any("--output_dir" in note.subject for note in draft.notes)


def test_a_recipe_whose_files_are_there_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("refcoco.jsonl", "refcocop.jsonl"):
        (tmp_path / name).write_text("{}\n{}\n")
    (tmp_path / "coco").mkdir()
    import_command(VLM_R1, tmp_path / "recipe.yaml")
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "still to do" in line and "package deepspeed" not in line] == []
    recipe = load_recipe("grpo", tmp_path / "recipe.yaml")
    assert recipe.train.steps == 600 and recipe.data.mix[0].weight == 1.0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ls -l", "no command of"),
        ('swift rlhf --rlhf_type grpo --model "m', "cannot be read"),
        (
            "swift rlhf --rlhf_type grpo --model m --num_generations many",
            "--num_generations many is not a number",
        ),
        ("swift rlhf --rlhf_type ppo --model m", "--rlhf_type ppo is not a method .*nearest: tiercel grpo"),
        ("swift rlhf --rlhf_type dpo --model m --loss_type kto_pair", r"kto_pair is not a method.*dpo\.loss:"),
        ("trl sft --model_name_or_path m --loss_type focal", r"--loss_type focal is not a method.*sft\.loss: nll"),
        ("swift rlhf --rlhf_type dpo --model m --loss_type sigmoid sft --loss_weights 1", "sft --loss_weights 1 is no"),
        ("swift rlhf --rlhf_type cpo --model m --loss_type robust", "--loss_type robust is not a method"),
        ("swift rlhf --rlhf_type gkd --model m", "a student that teaches itself is not a method"),
        ("swift rlhf --rlhf_type gkd --model m --teacher_model t --seq_kd true", "--seq_kd true: .*rows_share: 1"),
        ("trl dpo --model_name_or_path m --reference_free true", "--reference_free true: .*simpo or cpo"),
        ("trl prm --model_name_or_path m", "trl prm is not a method of this version; nearest: tiercel reward"),
        (
            "python online_dpo.py --model_name_or_path m",
            "online_dpo.py is not a method of this version; nearest: tiercel dpo",
        ),
        (
            "llamafactory-cli train --do_train --stage ppo",
            "--stage ppo is not a method of this version; nearest: tiercel gr",
        ),
        ("llamafactory-cli train --do_train --stage dpo --pref_loss kto_pair", "--pref_loss kto_pair is not a method"),
        (
            "llamafactory-cli train --do_train --finetuning_type oft",
            "--finetuning_type oft .*nearest: the section lora",
        ),
        ("llamafactory-cli train --do_predict --stage sft", "a command without do_train is not a method"),
        ("llamafactory-cli train", "a command without do_train is not a method"),
        (
            "llamafactory-cli train --do_train --stage dpo --pref_loss ipo --pref_bco_weight 0.5",
            r"--pref_bco_weight 0\.5 is",
        ),
        ("llamafactory-cli train nothing.yaml", "nothing.yaml is not on this machine, but it names the method"),
        ("swift rlhf --rlhf_type grpo --model m --num_generations 0", "--num_generations 0 must be above 0"),
        (
            "swift rlhf --rlhf_type grpo --model m --max_steps '$N' --warmup_ratio 0.1",
            r"--max_steps \$N is not a number",
        ),
        ("swift rlhf --rlhf_type grpo --model m --num_iterations 0.5", "num_iterations 0.5 is not a whole number"),
        ("swift rlhf --rlhf_type grpo --model m --save_total_limit .inf", "save_total_limit .inf is not a number"),
        ("swift rlhf --rlhf_type grpo --model m --max_steps inf", "--max_steps inf is not a number"),
        ("swift rlhf --rlhf_type grpo --model m --dataset_shuffle maybe", "dataset_shuffle maybe is neither true nor"),
        ("swift rlhf --rlhf_type grpo --model m --loss_type fipo", "--loss_type fipo .*nearest: algorithm.loss"),
        ("swift rlhf --rlhf_type grpo --model m --max_turns 3", "--max_turns 3: .*nearest: rollout.max_turns beside"),
        ("swift rlhf --rlhf_type grpo --model m --teacher_model t", "--teacher_model t: .*nearest: algorithm.teacher"),
        ("swift sft --model m --task_type seq_cls --num_labels 3", "--num_labels 3: .*nearest: tiercel sft on class"),
        ("swift sft --model m --tuner_type adalora", "--tuner_type adalora .*nearest: the section lora"),
    ],
)
def test_what_cannot_be_taken_over_is_named_with_what_comes_nearest(line, words):
    with pytest.raises(RecipeError, match=words):
        imported(line)


@pytest.mark.parametrize(
    "flags", ("--task_type causal_lm", "--use_gym_env false", "--loss_type grpo", "--use_galore false")
)
def test_a_method_that_is_off_is_no_reason_to_refuse(flags):
    text, _ = imported(f"swift rlhf --rlhf_type grpo --model m --dataset r {flags}")
    assert "group_size: 8" in text and flags.split()[0] in text


def refused(given: str) -> str:
    with pytest.raises(RecipeError) as error:
        imported(given)
    return str(error.value)


def test_an_error_names_the_file_and_a_command_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("nosuch.sh") == f"nosuch.sh: 1 problem\n  there is no such file (relative paths start at {tmp_path})"
    (tmp_path / "scripts").mkdir()
    assert refused("scripts") == "scripts: 1 problem\n  this is a directory; name the file of a script"
    (tmp_path / "latin.sh").write_bytes("echo\nswift sft --output_dir fr\xfcher\n".encode("latin-1"))
    assert refused("latin.sh") == "latin.sh: 1 problem\n  line 2 is not UTF-8 text; save the file as UTF-8"
    (tmp_path / "ppo.sh").write_text("swift rlhf --rlhf_type ppo --model m\n")
    fault = "1 problem\n  --rlhf_type ppo is not a method of this version; nearest: tiercel grpo"
    assert refused("ppo.sh") == f"ppo.sh: {fault}"
    assert refused("swift rlhf --rlhf_type ppo --model m") == fault


@pytest.mark.parametrize("words", ["--dataset r ...", "--dataset ...", "--dataset r \u2026", "... --dataset r"])
def test_a_command_with_words_left_out_is_refused(words):
    said = "1 problem\n  the command cannot be read: `...` stands for words that were left out; give the whole command"
    assert refused(f"swift sft --model org/m {words}") == said
    assert "path: m" in imported("swift sft --model m --dataset ../r.jsonl --output_dir ...x")[0]


@pytest.mark.parametrize("length", (200, 300, 4000, 5000))
def test_a_command_of_any_length_is_read(length):
    line = f"swift sft --model m --dataset rows --model_author {'a' * length}"
    assert "path: m" in imported(line)[0]
    with pytest.raises(RecipeError, match=r"no such file|no command of"):
        imported("a" * length)


def test_the_first_command_that_trains_is_taken(capsys):
    import_command(
        "swift rollout --model m\nswift rlhf --rlhf_type ppo --model a\nswift sft --model b --dataset r\n", None
    )
    printed = capsys.readouterr().out
    assert "path: b" in printed and "The first of 2 training commands" in printed


def test_what_is_left_to_do_and_what_is_wrong_is_told_in_chinese(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERCEL_LANG", "zh")
    (tmp_path / "plugin.py").write_text("class Right: ...\norms['right'] = Right\n")
    line = "swift rlhf --rlhf_type grpo --use_hf true --model org/m --dataset r.jsonl --external_plugins plugin.py"
    assert main(["import-command", f"{line} --reward_funcs wrong"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert "rewards.0.call: plugin.py 里没有函数 wrong" in first and first.endswith("Right, right")
    assert main(["import-command", "nosuch.sh"]) == 2
    heading, fault = capsys.readouterr().err.splitlines()
    assert heading == "tiercel import-command: nosuch.sh: 1 个问题" and fault.startswith("  没有这个文件")
    assert main(["import-command", f"{line} ..."]) == 2
    assert "把命令写全" in capsys.readouterr().err

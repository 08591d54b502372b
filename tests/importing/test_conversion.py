"""Recipes from other frameworks' commands, in the shapes that their examples have."""

import pytest

from tiercel.cli.import_command import import_command
from tiercel.config import load_recipe
from tiercel.config.yaml_text import parse
from tiercel.errors import RecipeError
from tiercel.importing.conversion import draft_of
from tiercel.importing.launches import launch_of
from tiercel.importing.shell import commands

SWIFT = """
# colocated vLLM, LoRA, several updates of a rollout
MAX_PIXELS=1003520 NPROC_PER_NODE=8 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-VL-7B-Instruct \\
    --external_plugins plugin.py \\
    --reward_funcs external_count format \\
    --reward_weights 1 0.5 \\
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --vllm_tensor_parallel_size 2 \\
    --train_type lora --lora_rank 16 --lora_alpha 64 --lora_dropout 0.05 \\
    --torch_dtype bfloat16 \\
    --dataset 'rows.jsonl#1000' \\
    --max_length 4096 --max_completion_length 1024 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 4 \\
    --learning_rate 1e-5 \\
    --num_generations 8 --temperature 1.0 --top_p 1.0 \\
    --beta 0.001 --loss_type dapo --epsilon 0.2 --epsilon_high 0.28 \\
    --dynamic_sample true --max_resample_times 5 --overlong_filter true \\
    --advantage_estimator reinforce_plus_plus --kl_in_reward true \\
    --deepspeed zero3 --save_steps 100 --logging_steps 5 --save_total_limit 2 \\
    --warmup_ratio 0.05 --attn_impl flash_attn --report_to wandb \\
    --output_dir output/grpo --no_such_flag 3
"""

VLM_R1 = """
export RUN_NAME="qwen-rec-lora"
torchrun --nproc_per_node="8" --nnodes="1" \\
  src/open_r1/grpo_jsonl.py \\
    --deepspeed local_scripts/zero3.json \\
    --output_dir checkpoints/$RUN_NAME \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \\
    --data_file_paths refcoco.jsonl \\
    --image_folders coco \\
    --is_reward_customized_from_vlm_module true \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_generations 8 \\
    --max_completion_length 2048 --beta 0.04 --bf16 \\
    --max_steps 600 --save_steps 100 --learning_rate 1e-5 \\
    --use_peft true --lora_r 64 --lora_alpha 128 --lora_dropout 0.05 \\
    --reward_funcs accuracy format --freeze_vision_modules true
"""

TRL = """
accelerate launch --num_processes 4 examples/grpo_vlm.py \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \\
    --dataset_name rows.jsonl \\
    --learning_rate 1e-5 --max_steps 200 --warmup_ratio 0.1 \\
    --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --num_generations 4 \\
    --use_peft --lora_target_modules q_proj v_proj \\
    --loss_type cispo --epsilon_high 5.0 --importance_sampling_level token \\
    --scale_rewards false --num_iterations 2 --mask_truncated_completions true \\
    --use_vllm --vllm_mode server --vllm_server_port 8001 \\
    --reward_funcs think_format_reward
"""


def drafted(script: str):
    launch = next(launch for launch in map(launch_of, commands(script)) if launch is not None)
    return draft_of(launch)


def test_a_command_of_ms_swift():
    draft = drafted(SWIFT)
    values = draft.values
    expected = {
        "model.path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "model.dtype": "bfloat16",
        "lora.rank": 16,
        "lora.alpha": 64,
        "lora.dropout": 0.0,
        "lora.targets": "language",
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
        "algorithm.advantage": "reinforce_pp_baseline",
        "algorithm.overlong": "mask",
        "optim.lr": 1e-5,
        "optim.schedule": "cosine",
        # 4 x 8 x 4 = 128 completions a rollout, 4 x 8 x 2 = 64 an update
        "optim.prompts_per_step": 16,
        "optim.minibatches": 2,
        "train.epochs": 1,
        "train.strategy": "deepspeed",
        "train.deepspeed.stage": 3,
        "train.save_every": 100,
        "train.keep": 2,
        "train.log_every": 5,
        "trackers": ["wandb"],
        "output": "output/grpo",
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["rewards"] == [
        {"call": "mine.py:external_count", "weight": 1.0},
        {"name": "format", "weight": 0.5},
    ]
    told = {flag.split()[0] for flag, _ in draft.notes}
    assert {
        "--no_such_flag",
        "--attn_impl",
        "--lora_dropout",
        "--warmup_ratio",
        "--external_plugins",
    } <= told
    assert "train.steps" not in values and "algorithm.scale" not in values


def test_a_command_of_vlm_r1():
    values = drafted(VLM_R1).values
    expected = {
        "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "model.dtype": "bfloat16",
        "lora.rank": 64,
        "lora.alpha": 128,
        "lora.dropout": 0.0,
        "data.train": "refcoco.jsonl",
        "data.image_root": "coco",
        "freeze": ["vision", "projector"],
        "optim.prompts_per_step": 16,  # 8 x 8 x 2 completions / 8
        "algorithm.kl.coef": 0.04,
        "train.steps": 600,
        "output": "checkpoints/qwen-rec-lora",
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["rewards"] == [{"name": "vlm_r1_rec"}, {"name": "format"}]
    assert "optim.minibatches" not in values and "train.epochs" not in values


def test_a_command_of_trl():
    values = drafted(TRL).values
    expected = {
        "optim.prompts_per_step": 8,  # 4 x 4 x 2 completions / 4
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 256,
        "rollout.engine": "vllm-server",
        "rollout.urls": ["http://127.0.0.1:8001"],
        "algorithm.loss": "cispo",
        "algorithm.clip_low": None,
        "algorithm.clip_high": 4.0,
        "algorithm.scale": "none",
        "algorithm.overlong": "mask",
        "optim.rollout_epochs": 2,
        "optim.warmup_steps": 20,
        "optim.schedule": "linear",
        "lora.rank": 16,
    }
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(("level", "loss"), [("sequence", "gspo"), ("sequence_token", "gspo_token"), ("token", "grpo")])
def test_the_level_of_the_ratio_is_part_of_the_losss_name(level, loss):
    line = f"swift rlhf --rlhf_type grpo --model m --importance_sampling_level {level} --loss_type grpo"
    assert drafted(line).values["algorithm.loss"] == loss


@pytest.mark.parametrize("script", (SWIFT, VLM_R1, TRL), ids=("ms-swift", "VLM-R1", "TRL"))
def test_the_text_is_a_recipe_but_for_what_the_command_does_not_say(script, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text(script)
    (tmp_path / "mine.py").write_text("def external_count(sample):\n    return 1\n")
    for name in ("rows.jsonl", "rows.jsonl#1000", "refcoco.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "coco").mkdir()
    import_command(str(tmp_path / "launch.sh"), tmp_path / "recipe.yaml")
    left = capsys.readouterr().err.splitlines()
    assert len(left) <= 1, left
    if not left:
        load_recipe("grpo", tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text()
    assert "  lr: 1.0e-05" in text or "  lr: 1e-05" in text
    assert "completions a rollout /" in text


def imported(line: str, capsys) -> str:
    import_command(line, None)
    return capsys.readouterr().out


def test_a_secret_stays_out(capsys):
    text = imported("swift rlhf --rlhf_type grpo --model m/m --dataset r --hub_token hf_SECRET", capsys)
    assert "hf_SECRET" not in text and "--hub_token: a secret stays out" in text


def test_a_value_with_line_ends_stays_in_its_line(capsys):
    text = imported(
        "swift rlhf --rlhf_type grpo --model m/m --dataset r --odd 'a\nseed: 3 #' --system 'You are: x\ny'", capsys
    )
    assert "\nseed" not in text and "You are: x" in text
    tree, _ = parse(text)
    assert tree["data"]["system"] == "You are: x\ny"


def test_full_fine_tuning_has_no_adapter(capsys):
    text = imported("swift rlhf --rlhf_type grpo --model m/m --dataset r --train_type full --lora_rank 8", capsys)
    assert "\nlora:" not in text and "lr: 1.0e-05" in text
    text = imported("trl grpo --model_name_or_path m/m --dataset_name r --lora_r 16", capsys)
    assert "\nlora:" not in text


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--advantage_estimator rloo --beta 0.04", "algorithm.kl.place", "reward"),
        ("--advantage_estimator rloo --beta 0.04 --kl_in_reward false", "algorithm.kl.place", "loss"),
        ("--deepspeed /data/qwen2/zero3.json", "train.deepspeed.stage", 3),
        ("--deepspeed zero2", "train.deepspeed.stage", 2),
        ("--ref_model_sync_steps 64 --sync_ref_model true", "algorithm.kl.sync_every", 64),
        ("--sync_ref_model true --ref_model_sync_steps 64", "algorithm.kl.sync_every", 64),
        ("--sync_ref_model false --ref_model_sync_steps 64", "algorithm.kl.sync_every", None),
        (
            "--reward_funcs cosine --soft_max_length 900 --cosine_max_len 2000",
            "rewards",
            [{"name": "cosine", "max_tokens": 2000}],
        ),
        (
            "--reward_funcs format --reward_model org/one /data/two --reward_weights 1 0.5",
            "rewards",
            [
                {"name": "format", "weight": 1.0},
                {"name": "model", "model": {"path": "org/one"}, "weight": 0.5},
                {"name": "model", "model": {"path": "/data/two"}, "weight": 1.0},
            ],
        ),
        ("--reward_model org/one", "rewards", [{"name": "model", "model": {"path": "org/one"}}]),
    ],
)
def test_flags_that_depend_on_others(flags, key, value):
    assert drafted(f"swift rlhf --rlhf_type grpo --model m/m --dataset r {flags}").values.get(key) == value


@pytest.mark.parametrize(
    ("value", "trackers", "noted"),
    [
        ("swanlab", ["swanlab"], []),
        ("tensorboard trackio", ["tensorboard", "trackio"], []),
        ("none", None, []),
        ("mlflow wandb", ["wandb"], ["--report_to mlflow"]),
        ("all", None, ["--report_to all"]),
    ],
)
def test_trackers_are_taken_over_by_name(value, trackers, noted):
    draft = drafted(f"trl grpo --model_name_or_path m/m --dataset_name r --report_to {value}")
    assert draft.values.get("trackers") == trackers
    assert [flag for flag, _ in draft.notes if "report_to" in flag] == noted


@pytest.mark.parametrize(
    ("flags", "weights", "told"),
    [
        ("", (1.0, 1.0), "equal parts until data.mix.N.weight is set"),
        ("--interleave_prob 0.5 0.25 0.25", (0.5, 0.5), "an epoch there ends with the first file"),
        ("--interleave_prob 0.5 0.5", (1.0, 1.0), "equal parts until data.mix.N.weight is set"),
    ],
)
def test_several_files_are_mixed(flags, weights, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    line = f"swift rlhf --rlhf_type grpo --model m/m --reward_funcs format --dataset a.jsonl b.jsonl c.jsonl {flags}"
    import_command(line, tmp_path / "recipe.yaml")
    data = load_recipe("grpo", tmp_path / "recipe.yaml").data
    assert data.train == "a.jsonl"
    assert [(more.path, more.weight) for more in data.mix] == list(zip(("b.jsonl", "c.jsonl"), weights, strict=True))
    assert told in (tmp_path / "recipe.yaml").read_text()
    capsys.readouterr()


def test_an_sft_command_counts_rows(capsys):
    import_command("NPROC_PER_NODE=2 swift sft --model m/m --dataset r.jsonl --per_device_train_batch_size 3", None)
    printed = capsys.readouterr().out
    assert "prompts_per_step: 6" in printed and "--nproc 2" in printed
    assert "rollout:" not in printed and "algorithm:" not in printed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ls -l", "no command of"),
        ('swift rlhf --rlhf_type grpo --model "m', "cannot be read"),
        ("swift rlhf --rlhf_type grpo --model m --num_generations many", "cannot be read"),
        ("swift rlhf --rlhf_type dpo --model m", "no command of"),
        ("swift rlhf --rlhf_type grpo --model m --num_generations 0", "is not above 0"),
        ("swift rlhf --rlhf_type grpo --model m --max_steps '$N' --warmup_ratio 0.1", "is no number"),
    ],
)
def test_what_cannot_be_read_is_said(line, words):
    with pytest.raises(RecipeError, match=words):
        import_command(line, None)


def test_files_and_folders_of_vlm_r1_with_colons_between():
    line = "python grpo_jsonl.py --model_name_or_path m/m --data_file_paths a.jsonl:b.jsonl --image_folders x:y"
    draft = drafted(line)
    assert draft.values["data.train"] == "a.jsonl" and draft.values["data.image_root"] == "x"
    assert draft.values["data.mix"] == [{"path": "b.jsonl", "weight": 1.0, "image_root": "y"}]
    assert any("equal parts" in note for _, note in draft.notes)
    odd = drafted(line.replace("x:y", "x:y:z"))
    assert "data.image_root" not in odd.values
    assert any("not one for each file" in note for _, note in odd.notes)

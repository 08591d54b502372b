"""Sizes, lengths and intervals, with numbers worked by hand."""

import pytest

from tests.convert.helpers import GRPO, SFT, TRL, drafted, told, values_of

EACH = "--per_device_train_batch_size"


@pytest.mark.parametrize(
    ("flags", "prompts", "minibatches"),
    [
        # 2 x 8 x 8 = 128 completions in an update, 2 x 8 x 32 = 512 in a rollout, 16 in a group
        (f"{EACH} 2 --gradient_accumulation_steps 8 --steps_per_generation 32 --num_generations 16",
         32, 4),
        # a rollout of 4 within an update of 16: four rollouts of one policy count as one of 16
        (f"{EACH} 1 --gradient_accumulation_steps 2 --generation_batch_size 4 --num_generations 4",
         4, None),
        (f"{EACH} 1 --num_generations 8", 1, None),
        # 2 x 8 x 8 = 128 completions in an update, and the same number in a rollout, 4 in a group
        (f"{EACH} 2 --gradient_accumulation_steps 8 --num_generations 4", 32, None),
    ],
)  # fmt: skip
def test_completions_become_prompts(flags, prompts, minibatches):
    values = values_of(f"NPROC_PER_NODE=8 {GRPO} {flags}")
    assert values.get("optim.prompts_per_step", 16) == prompts
    assert values.get("optim.minibatches") == minibatches


def test_rows_of_an_sft_step():
    assert (
        values_of(f"NPROC_PER_NODE=2 {SFT} --per_device_train_batch_size 3")["optim.prompts_per_step"] == 18
    )  # 3 x 2 x 3
    values = values_of(f"NPROC_PER_NODE=2 {SFT} --per_device_train_batch_size 3 --gradient_accumulation_steps 1")
    assert values["optim.prompts_per_step"] == 6


def test_updates_become_steps():
    flags = "--max_steps 600 --save_steps 100 --logging_steps 5 --warmup_ratio 0.1 --num_iterations 2"
    values = values_of(f"{GRPO} {flags} --per_device_train_batch_size 8 --steps_per_generation 2")
    # 16 completions in a rollout, 8 in an update, twice: 4 updates in a step
    assert values["train.steps"] == 150 and values["train.save_every"] == 25
    assert values["optim.warmup_steps"] == 15 and values["train.log_every"] == 1


def test_the_warm_up_is_counted_where_the_rows_are():
    line = f"{SFT} --num_train_epochs 1 --warmup_ratio 0.05 --split_dataset_ratio 0.01".replace(
        "r.jsonl", "r.jsonl#20000"
    )
    assert values_of(line)["optim.warmup_steps"] == 62  # 20000 x 0.99 / 16 = 1237.5 steps
    draft = drafted(f"{SFT} --warmup_ratio 0.05")
    assert "optim.warmup_steps" not in draft.values and "--warmup_ratio 0.05: write optim.warmup_steps" in told(draft)


def test_a_long_prompt_and_completion_fit_a_pack():
    values = values_of(f"{GRPO} --max_length 12000 --max_completion_length 8192")
    assert values["learner.max_tokens_per_microbatch"] == 20192
    assert "learner.max_tokens_per_microbatch" not in values_of(GRPO)


@pytest.mark.parametrize(
    ("flags", "every", "spoken"),
    [
        ("--split_dataset_ratio 0.01 --eval_steps 50", 50, ""),
        ("--split_dataset_ratio 0.01 --save_steps 70", 70, ""),
        ("--split_dataset_ratio 0.01 --eval_strategy no", None, "tiercel evaluates held-out rows at the start"),
        ("--eval_steps 50", None, "no rows are held out"),
        ("--eval_strategy no", None, "no rows are held out"),
        ("--split_dataset_ratio 0.01 --eval_strategy epoch", None, "train.eval_every is a number of steps"),
    ],
)
def test_evaluations(flags, every, spoken):
    draft = drafted(f"{SFT} {flags}")
    assert draft.values.get("train.eval_every") == every
    assert spoken in told(draft)
    ratio = {"fraction": 0.01} if "0.01" in flags else None
    assert draft.values.get("data.eval") == ratio


def test_processes_that_only_the_machine_knows():
    draft = drafted("torchrun --nproc_per_node=$GPUS grpo_train.py --model_name_or_path m --dataset_name r.jsonl")
    assert "only the machine knows this number" in told(draft)
    assert told(draft).count("$GPUS") == 1
    script = TRL.replace("trl grpo", "grpo_x.py")
    line = f"accelerate launch --config_file nowhere/deepspeed_zero2.yaml {script} --use_peft"
    draft = drafted(line)
    assert draft.values["train.deepspeed.stage"] == 2 and "how many processes it starts is unknown" in told(draft)


def test_a_variable_that_a_launchers_flag_hides_is_not_named_with_it():
    flags = GRPO.partition(" rlhf ")[2]
    draft = drafted(f"NPROC_PER_NODE=$GPUS torchrun --nproc_per_node=$GPUS swift/cli/rlhf.py {flags}")
    (note,) = [note for note in draft.notes if "only the machine knows" in note.text]
    assert note.subject == "the launcher's --nproc_per_node $GPUS"


@pytest.mark.parametrize(
    ("each", "group", "text"),
    [
        (1, 8, "1 completion cannot be divided into groups of 8; a step of tiercel has 1 prompt"),
        (17, 8, "17 completions cannot be divided into groups of 8; a step of tiercel has 2 prompts"),
    ],
)
def test_one_is_not_written_as_many(each, group, text):
    draft = drafted(f"{GRPO} {EACH} {each} --num_generations {group}")
    assert f"{EACH} {each}: {text}" in told(draft).splitlines()
    assert f"{each} per device x 1 process x" in draft.origins["optim.prompts_per_step"].remark


def test_a_file_of_accelerate_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "num_processes: 6\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n"
    )
    values = values_of(f"accelerate launch --config_file c.yaml {TRL.replace('trl grpo', 'grpo_x.py')} --use_peft")
    assert values["optim.prompts_per_step"] == 6  # 8 x 6 completions / 8
    assert values["train.deepspeed.offload_optimizer"] is True and "train.deepspeed.offload_parameters" not in values


def test_trls_own_program_takes_flags_of_accelerate():
    draft = drafted(f"{TRL} --use_peft --num_processes 3 --accelerate_config zero2")
    assert draft.values["optim.prompts_per_step"] == 3 and draft.values["train.deepspeed.stage"] == 2
    assert "3 processes in all" in told(draft) and "sharding is taken from its name" in told(draft)


def test_flags_of_a_file_come_before_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.yaml").write_text(
        "model_name_or_path: org/m\nlearning_rate: 3.0e-6\nuse_peft: true\nbeta: 0.1\n"
    )
    draft = drafted("trl grpo --config flags.yaml --dataset_name r.jsonl --beta 0.2")
    assert draft.values["optim.lr"] == 3e-6 and draft.values["algorithm.kl.coef"] == 0.2
    assert draft.values["lora.rank"] == 16 and "its flags were read" in told(draft)
    assert "its flags are lost" in told(drafted("trl grpo --config none.yaml --model_name_or_path m --dataset_name r"))

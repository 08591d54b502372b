"""Sizes, lengths and intervals, with numbers worked by hand."""

import json

import pytest

from tests.convert.helpers import DPO, GRPO, SFT, TRL, drafted, told, values_of

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


@pytest.mark.parametrize(
    ("command", "accumulated", "prompts"),
    [
        (SFT, "--gradient_accumulation_steps 8", 16),  # 1 x 8 / 4 x 8
        (DPO, "--gradient_accumulation_steps 8", 16),
        (SFT, "", 4),  # ceil(16 / (1 x 8)) = 2 accumulated, for all 8 processes; 1 x 8 / 4 x 2
        (GRPO, "--gradient_accumulation_steps 8", 8),  # 1 x 8 x 8 completions / 8 of a group
    ],
)
def test_ranks_that_share_a_row_count_once_but_in_grpo(command, accumulated, prompts):
    draft = drafted(f"NPROC_PER_NODE=8 {command} --sequence_parallel_size 4 {EACH} 1 {accumulated}")
    assert draft.values.get("optim.prompts_per_step", 16) == prompts
    told_once = "counts the ranks that share a row once"
    assert (told_once in told(draft)) == (command != GRPO) and "8 processes in all" in told(draft)


def test_updates_become_steps():
    flags = "--max_steps 600 --save_steps 100 --logging_steps 5 --warmup_ratio 0.1 --num_iterations 2"
    values = values_of(f"{GRPO} {flags} --per_device_train_batch_size 8 --steps_per_generation 2")
    # 16 completions in a rollout, 8 in an update, twice: 4 updates in a step
    assert values["train.steps"] == 150 and values["train.save_every"] == 25
    assert values["optim.warmup_steps"] == 15 and values["train.log_every"] == 1


def test_lengths_are_divided_by_the_peers_own_updates():
    # 2 x 2 x 8 = 32 completions in a rollout, 2 x 2 = 4 in an update: TRL makes 8 updates of a rollout of 4 groups,
    # the recipe 4, since an update holds whole groups. 800 updates are 100 rollouts either way.
    sizes = f"{EACH} 2 --num_processes 2 --steps_per_generation 8 --gradient_accumulation_steps 1 --num_generations 8"
    flags = "--max_steps 800 --warmup_steps 80 --save_steps 160 --use_peft"
    flags = f"{flags} --sync_ref_model true --ref_model_sync_steps 240"
    values = values_of(f"{TRL} {sizes} {flags} --beta 0.1")
    expected = {
        "optim.prompts_per_step": 4, "optim.minibatches": 4, "train.steps": 100, "optim.warmup_steps": 10,
        "train.save_every": 20, "algorithm.kl.sync_every": 30,
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected
    twice = values_of(f"{TRL} {sizes} {flags} --num_iterations 2")
    assert twice["train.steps"] == 50 and twice["optim.minibatches"] == 4
    # RLOO takes one update of a rollout in the recipe, 8 in TRL
    rloo = values_of(f"{TRL.replace('grpo', 'rloo')} {sizes} {flags}")
    assert rloo["train.steps"] == 100 and "optim.minibatches" not in rloo


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


_SCRIPT = TRL.replace("trl grpo", "train_grpo.py")


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch {_SCRIPT}", 4),
        (f"CUDA_VISIBLE_DEVICES=0,1,2 {TRL}", 3),
        (f"CUDA_VISIBLE_DEVICES=0,1 deepspeed {_SCRIPT}", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --gpu_ids 4,5 {_SCRIPT}", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --gpu_ids all {_SCRIPT}", 4),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 2 {_SCRIPT}", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --cpu {_SCRIPT}", 1),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed --num_gpus 8 {_SCRIPT}", 8),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 python {_SCRIPT}", 1),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun {_SCRIPT}", 1),
    ],
)
def test_a_process_for_each_gpu_that_is_seen(line, processes):
    draft = drafted(f"{line} {EACH} 4 --gradient_accumulation_steps 4")  # 4 x 4 completions a process / 8 a group
    assert draft.launch.processes == processes and draft.values.get("optim.prompts_per_step", 16) == 2 * processes
    assert "starts a process for each GPU" not in told(draft)


@pytest.mark.parametrize(
    ("line", "starter"),
    [(f"accelerate launch {_SCRIPT}", "accelerate launch"), (TRL, "trl"), (f"deepspeed {_SCRIPT}", "deepspeed"),
     (f"python {_SCRIPT}", None), (f"accelerate launch --config_file a.yaml {_SCRIPT}", None)],
)  # fmt: skip
def test_who_starts_a_process_for_each_gpu_is_told(line, starter):
    said = [note.subject for note in drafted(line).notes if "starts a process for each GPU that it sees" in note.text]
    assert said == ([starter] if starter else [])


@pytest.mark.parametrize(
    ("line", "key", "every"),
    [
        (f"{SFT} --max_steps 1000 --split_dataset_ratio 0.02 --eval_strategy steps --eval_steps 0.1",
         "train.eval_every", 100),
        (f"{SFT} --max_steps 200 --save_steps 0.2", "train.save_every", 40),
        (f"{SFT} --max_steps 200 --split_dataset_ratio 0.02 --save_steps 0.2", "train.eval_every", 40),  # as save_steps
        (f"{SFT} --max_steps 10 --logging_steps 0.15", "train.log_every", 2),  # ceil(1.5)
        # 20000 x 0.98 / 16 = 1225 steps of an epoch, 1225 x 0.3 = 367.5
        (f"{SFT}#20000 --num_train_epochs 1 --split_dataset_ratio 0.02 --eval_steps 0.3", "train.eval_every", 368),
        # 4 updates in a step: 600 updates are 150 steps, and 150 x 0.1 = 15
        (f"{GRPO} --max_steps 600 --save_steps 0.1 --num_iterations 2 {EACH} 8 --steps_per_generation 2",
         "train.save_every", 15),
    ],
)  # fmt: skip
def test_a_share_of_the_run_becomes_steps(line, key, every):
    draft = drafted(line)
    assert draft.values.get(key) == every and "a share of the run" not in told(draft)


def test_a_share_of_a_run_of_unknown_length_is_told():
    draft = drafted(f"{SFT} --split_dataset_ratio 0.02 --eval_strategy steps --eval_steps 0.1 --save_steps 0.2")
    assert not {"train.eval_every", "train.save_every"} & {*draft.values}
    text = "is a share of the run in ms-swift; write train.{}: this share of the run's steps"
    assert f"0.1 {text.format('eval_every')}" in told(draft) and f"0.2 {text.format('save_every')}" in told(draft)


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


@pytest.mark.parametrize("is_there", (True, False))
def test_a_file_of_accelerate_may_name_one_of_deepspeed(tmp_path, monkeypatch, is_there):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("num_processes: 6\ndeepspeed_config: {deepspeed_config_file: ds_z3.json}\n")
    if is_there:
        config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        (tmp_path / "ds_z3.json").write_text(json.dumps(config))
    values = values_of(f"accelerate launch --config_file c.yaml {TRL.replace('trl grpo', 'grpo_x.py')} --use_peft")
    assert values["train.strategy"] == "deepspeed" and values["train.deepspeed.stage"] == 3
    assert values.get("train.deepspeed.offload_parameters", False) is is_there


def test_trls_own_program_takes_flags_of_accelerate():
    draft = drafted(f"{TRL} --use_peft --num_processes 3 --accelerate_config zero2")
    assert draft.values["optim.prompts_per_step"] == 3 and draft.values["train.deepspeed.stage"] == 2
    assert "3 processes in all" in told(draft) and "sharding is taken from its name" in told(draft)


@pytest.mark.parametrize(("flags", "prompts"), [("", 4), ("--num_processes 2", 2)])
def test_trls_file_has_flags_of_accelerate_too(tmp_path, monkeypatch, flags, prompts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.yaml").write_text(
        "model_name_or_path: org/m\ndataset_name: r.jsonl\nnum_processes: 4\naccelerate_config: zero3\n"
        "num_machines: null\nuse_peft: true\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
    )
    draft = drafted(f"trl grpo --config conf.yaml {flags}")  # 2 x 4 completions a process / 8 a group
    assert draft.values["optim.prompts_per_step"] == prompts and draft.values["train.deepspeed.stage"] == 3
    assert f"{prompts} processes in all" in told(draft) and "how many processes" not in told(draft)


def test_flags_of_a_file_come_before_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.yaml").write_text(
        "model_name_or_path: org/m\nlearning_rate: 3.0e-6\nuse_peft: true\nbeta: 0.1\n"
    )
    draft = drafted("trl grpo --config flags.yaml --dataset_name r.jsonl --beta 0.2")
    assert draft.values["optim.lr"] == 3e-6 and draft.values["algorithm.kl.coef"] == 0.2
    assert draft.values["lora.rank"] == 16 and "its flags were read" in told(draft)
    assert "its flags are lost" in told(drafted("trl grpo --config none.yaml --model_name_or_path m --dataset_name r"))


@pytest.mark.parametrize(
    ("script", "flags", "prompts"),
    [
        # R1-V, Video-R1 and their kin: 1 x 8 x 2 prompts, each with 8 completions
        ("src/open_r1/grpo.py --dataset_name org/rows", "", 16),
        # with its vLLM trainer, and in VLM-R1, 1 x 8 x 2 are completions
        ("src/open_r1/grpo.py --dataset_name org/rows", "--use_vllm true", 2),
        ("src/open_r1/grpo_jsonl.py --data_file_paths a.jsonl --image_folders x", "", 2),
    ],
)
def test_r1_v_counts_prompts(script, flags, prompts):
    """As in the command of R1-V 106."""
    line = (
        f"torchrun --nproc_per_node=8 {script} --model_name_or_path org/Qwen2-VL-2B-Instruct --output_dir out "
        f"{EACH} 1 --gradient_accumulation_steps 2 --num_generations 8 {flags}"
    )
    values = values_of(line)
    assert values.get("optim.prompts_per_step", 16) == prompts
    assert values.get("rollout.group_size", 8) == 8 and values.get("optim.minibatches", 1) == 1


_COSINE = "--lr_scheduler_type cosine_with_min_lr --learning_rate 2e-5 --lr_scheduler_kwargs"
_STABLE = "--lr_scheduler_type warmup_stable_decay --learning_rate 1e-4 --lr_scheduler_kwargs"
_VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=org/m "
    "data.train_files=t.parquet actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.min_lr_ratio=0.1"
)


@pytest.mark.parametrize(
    ("line", "schedule", "least", "decay"),
    [
        (f"{TRL} {_COSINE} '{{\"min_lr_rate\": 0.1}}'", "cosine", 2e-6, None),
        (f"{GRPO} {_COSINE} '{{\"min_lr\": 1e-6}}'", "cosine", 1e-6, None),
        (f'{SFT} {_STABLE} \'{{"num_decay_steps": 40, "min_lr_ratio": 0.1}}\'', "wsd", 1e-5, 40),
        (f"{_VERL} actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "cosine", 1e-7, None),
        (_VERL, None, None, None),  # constant, which has no end
    ],
)
def test_the_rate_that_a_schedule_falls_to(line, schedule, least, decay):
    """As ms-swift 5754 asks for it; the recipe fell to 0."""
    values = values_of(line)
    assert (values.get("optim.schedule"), values.get("optim.min_lr")) == (schedule, least)
    assert values.get("optim.decay_steps") == decay


def test_other_arguments_of_a_schedule_are_told():
    flags = "--lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs '{\"num_cycles\": 3}'"
    assert "num_cycles: no schedule of tiercel takes it" in told(drafted(f"{TRL} {flags}"))
    flags = "--lr_scheduler_type constant --lr_scheduler_kwargs '{\"num_cycles\": 3}'"
    assert "a constant rate takes none" in told(drafted(f"{TRL} {flags}"))

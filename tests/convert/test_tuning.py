"""What is trained: adapters, parts, rates, precision, sharding."""

import json

import pytest

from tests.convert.helpers import GRPO, REC, SFT, TRL, drafted, told, values_of
from tests.convert.shapes import SWIFT_LORA_LLM

ABSENT = "absent"


def check(line: str, expected: dict[str, object]) -> None:
    values = values_of(line)
    assert {key: values.get(key, ABSENT) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "targets", "freeze"),
    [
        ("--target_modules all-linear --freeze_vit true", "language", ABSENT),
        ("", "language", ABSENT),
        ("--freeze_vit false --freeze_aligner false", "all", ABSENT),
        ("--freeze_llm true --freeze_vit false", "vision", ABSENT),
        ("--target_modules q_proj v_proj", r"(.*\.)?(q_proj|v_proj)", ABSENT),
        ("--target_regex 'model[.]x.*'", "model[.]x.*", ABSENT),
        ("--tuner_type lora_llm", "language", []),
        ("--tuner_type full", ABSENT, ["vision", "projector"]),
        ("--tuner_type full --freeze_vit false", ABSENT, ["projector"]),
        ("--tuner_type full --freeze_vit false --freeze_aligner false --freeze_llm true", ABSENT, ["language"]),
    ],
)
def test_parts_of_ms_swift(flags, targets, freeze):
    check(f"{SFT} {flags}", {"lora.targets": targets, "freeze": freeze})


def test_two_of_three_parts_are_told():
    draft = drafted(f"{SFT} --freeze_vit false")
    assert draft.values["lora.targets"] == "all" and "only vision and language in ms-swift" in told(draft)


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ('"q_proj", "v_proj"', r"(.*\.)?(q_proj|v_proj)"),
        ("q_proj v_proj", r"(.*\.)?(q_proj|v_proj)"),
        ("down_proj, o_proj", r"(.*\.)?(down_proj|o_proj)"),
        ("all-linear", "all"),
        (r"'model\.language_model\..*(q_proj|v_proj)'", r"model\.language_model\..*(q_proj|v_proj)"),
        (r"'.*layers\.(\d|1[0-5])\..*_proj, x'", r".*layers\.(\d|1[0-5])\..*_proj, x"),  # PEFT does not split it
        ("'model.layers.[0-9].mlp.up_proj'", "model.layers.[0-9].mlp.up_proj"),
        ("'[q_proj,v_proj]'", r"(.*\.)?(q_proj|v_proj)"),
    ],
)
def test_layers_of_trl(words, targets):
    check(f"{TRL} --use_peft --lora_target_modules {words}", {"lora.targets": targets})


@pytest.mark.parametrize(
    ("line", "freeze"),
    [
        (REC, []),
        (f"{REC} --freeze_vision_modules true", ["vision", "projector"]),
        (f"{REC} --freeze_vision_modules true".replace("Qwen2-VL", "InternVL2"), ["vision"]),
        (f"{REC} --freeze_vision_modules true --use_peft true", ABSENT),
        (TRL, []),
    ],
)
def test_parts_of_vlm_r1_and_trl(line, freeze):
    check(line, {"freeze": freeze})


def test_rates_of_parts_and_a_tower_that_is_trained_whole():
    expected = {"lora.targets": "language", "freeze": [], "optim.part_lr.vision": 1e-5, "optim.part_lr.projector": 2e-5}
    check(SWIFT_LORA_LLM, expected | {"optim.lr": 1e-4, "lora.dropout": ABSENT, "train.strategy": "fsdp2"})
    draft = drafted(f"{SFT} --vit_lr 1e-5")
    assert "optim.part_lr.vision" not in draft.values and "--vit_lr 1e-5" in told(draft)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--deepspeed zero3_offload", ("deepspeed", 3, True, True)),
        ("--deepspeed zero2_offload", ("deepspeed", 2, ABSENT, True)),
        ("--deepspeed zero3", ("deepspeed", 3, ABSENT, ABSENT)),
        ("--deepspeed zero1", ("deepspeed", 2, ABSENT, ABSENT)),
        ("--deepspeed zero0", ("ddp", ABSENT, ABSENT, ABSENT)),
        ("--fsdp fsdp2", ("fsdp2", ABSENT, ABSENT, ABSENT)),
        ("--offload_optimizer true --offload_model true", (ABSENT, ABSENT, ABSENT, ABSENT)),
        ("""--deepspeed '{"zero_optimization": {"stage": 2}}'""", ("deepspeed", 2, ABSENT, ABSENT)),
    ],
)
def test_sharding(flags, expected):
    keys = ("train.strategy", "train.deepspeed.stage", "train.deepspeed.offload_parameters",
            "train.deepspeed.offload_optimizer")  # fmt: skip
    check(f"NPROC_PER_NODE=2 {GRPO} {flags}", dict(zip(keys, expected, strict=True)))


def test_a_stage_that_is_not_here_is_told_beside_the_value():
    origin = drafted(f"{GRPO} --deepspeed zero1").origins["train.deepspeed.stage"]
    assert "stage 1 divides the optimiser's state only;" in origin.remark
    draft = drafted(f"{GRPO} --offload_optimizer true --offload_model true")
    assert "while the engine works" in told(draft)


def test_a_deepspeed_file_is_read_where_it_is_there(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    script = tmp_path / "scripts" / "run.sh"
    draft = drafted(f"{GRPO} --deepspeed ds.json", script)
    assert draft.values["train.deepspeed.stage"] == 3
    assert draft.values["train.deepspeed.offload_parameters"] is True
    assert "train.deepspeed.offload_optimizer" not in draft.values
    draft = drafted(f"{GRPO} --deepspeed nowhere/zero2.json")
    assert draft.values["train.deepspeed.stage"] == 2 and "taken from its name" in told(draft)
    draft = drafted(f"{GRPO} --deepspeed nowhere/mine.json")
    assert "train.strategy" not in draft.values and "write train.strategy: deepspeed" in told(draft)


def test_full_fine_tuning_with_a_penalty_keeps_its_start_under_fsdp2():
    draft = drafted(f"NPROC_PER_NODE=4 {GRPO} --tuner_type full --deepspeed zero3 --beta 0.04 --use_vllm true")
    values = draft.values
    assert values["model.reference"] == "device" and values["train.strategy"] == "fsdp2"
    assert values["rollout.engine"] == "vllm" and "the local engine samples" not in told(draft)
    assert "train.deepspeed.stage" not in values


VLLM = f"{GRPO} --use_vllm true --vllm_mode colocate"
ALL = "--freeze_vit false --freeze_aligner false"


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        (f"{VLLM} --tuner_type full", "vllm"),
        (f"{VLLM} --tuner_type full --freeze_vit false", "vllm"),
        (f"{GRPO} --tuner_type full --use_vllm true --vllm_mode server", "vllm-server"),
        (f"{VLLM} {ALL} --model Qwen/Qwen2.5-VL-7B-Instruct", "vllm"),
        (f"{VLLM} {ALL} --model Qwen/Qwen3.5-4B", "vllm"),
    ],
)
def test_vllm_samples_from_what_is_trained(line, engine):
    draft = drafted(line)
    assert draft.values["rollout.engine"] == engine and "the local engine samples" not in told(draft)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{VLLM} --tuner_type lora_llm", "would not receive the parts that are trained whole"),
        (f"{VLLM} --use_dora true", "does not accept such adapters"),
        (f"{VLLM} --model llava-hf/llava-onevision-qwen2-7b-ov-hf", "vLLM cannot sample for llava_onevision"),
        (f"{VLLM} {ALL} --model OpenGVLab/InternVL3-8B", "vLLM applies adapters on vision layers of qwen2_vl"),
        (f"{VLLM} {ALL} --model Qwen/Qwen3-VL-30B-A3B-Instruct", "vLLM applies adapters on vision layers of qwen2_vl"),
    ],
)
def test_local_samples_where_vllm_could_not(line, reason):
    draft = drafted(f"{line} --vllm_gpu_memory_utilization 0.4")
    assert draft.values["rollout.engine"] == "local" and reason in told(draft) and "local engine" in told(draft)
    assert not [key for key in draft.values if key.startswith("rollout.vllm")]


def test_whole_weights_go_to_vllm_at_a_light_sleep():
    draft = drafted(f"NPROC_PER_NODE=4 {VLLM} --tuner_type full --deepspeed zero3 --beta 0 --sleep_level 2")
    expected = {"rollout.engine": "vllm", "rollout.vllm.sleep_level": 1, "train.strategy": "deepspeed"}
    assert {key: draft.values.get(key) for key in expected} == expected
    assert "level 2 drops weights" in told(draft)
    adapted = drafted(f"NPROC_PER_NODE=4 {VLLM} --deepspeed zero3 --sleep_level 2")
    assert adapted.values["train.strategy"] == "deepspeed" and adapted.values["rollout.vllm.sleep_level"] == 2


def test_the_reference_of_full_fine_tuning_stays():
    draft = drafted(f"{GRPO} --tuner_type full --sync_ref_model true")
    assert "algorithm.kl.sync_every" not in draft.values and "moves the reference only for adapters" in told(draft)


@pytest.mark.parametrize(
    ("line", "checkpointing"),
    [
        (f"{SFT} --gradient_checkpointing true --vit_gradient_checkpointing false", True),
        (f"{SFT} --vit_gradient_checkpointing false", True),
        (f"{SFT} --gradient_checkpointing false", False),
    ],
)
def test_checkpointing_of_the_tower_is_no_checkpointing_of_the_decoder(line, checkpointing):
    check(line, {"learner.gradient_checkpointing": checkpointing})


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        (TRL, "bfloat16"),
        (f"{TRL} --bf16 false", "float32"),
        (f"{TRL} --bf16 false --dtype bfloat16", "bfloat16"),
        (f"{TRL} --fp16", "float16"),
        (REC, "float32"),
        (f"{REC} --bf16", "bfloat16"),
        (f"{GRPO} --torch_dtype float16", "float16"),
    ],
)
def test_what_is_computed_in(line, dtype):
    check(line, {"model.dtype": dtype})


def test_pixels_and_frames_come_from_the_environment():
    variables = "MAX_PIXELS=1003520 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12 FPS=1 "
    expected = {
        "model.max_pixels": 1003520,
        "data.video.max_pixels": 50176,
        "data.video.max_frames": 12,
        "data.video.fps": 1,
    }
    check(variables + SFT, expected)
    check(f"IMAGE_MAX_TOKEN_NUM=1024 {SFT.replace('org/m', 'org/Qwen3-VL')}", {"model.max_pixels": 1024 * 32 * 32})
    check(f"IMAGE_MAX_TOKEN_NUM=1024 {SFT.replace('org/m', 'org/Qwen2.5-VL')}", {"model.max_pixels": 1024 * 28 * 28})


def test_tiles_are_no_pixels_and_processes_that_convert_no_workers():
    values = values_of(f"{REC} --max_anyres_num 6".replace("Qwen2-VL", "InternVL2"))
    assert "model.max_pixels" not in values
    assert "data.workers" not in values_of(f"{SFT} --dataset_num_proc 64")


@pytest.mark.parametrize(
    ("value", "trackers", "noted"),
    [
        ("swanlab", ["swanlab"], []),
        ("tensorboard trackio", ["tensorboard", "trackio"], []),
        ("none", [], []),
        ("mlflow comet_ml wandb", ["mlflow", "wandb"], ["--report_to comet_ml"]),
        ("all", [], ["--report_to all"]),
    ],
)
def test_trackers_are_taken_over_by_name(value, trackers, noted):
    draft = drafted(f"{TRL} --report_to {value}")
    assert draft.values["trackers"] == trackers
    assert [note.subject for note in draft.notes if "report_to" in note.subject] == noted


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{SFT} --quant_method bnb --quant_bits 4 --bnb_4bit_compute_dtype bfloat16", {"model.quantize": "nf4"}),
        (f"{SFT} --quant_bits 8", {"model.quantize": "int8"}),
        (f"{SFT} --quant_bits 4 --bnb_4bit_quant_type fp4", {"model.quantize": ABSENT}),
        (f"{TRL} --use_peft --load_in_4bit", {"model.quantize": "nf4"}),
        (f"{TRL} --use_peft --load_in_8bit true --load_in_4bit false", {"model.quantize": "int8"}),
        (f"{SFT} --quant_method hqq --quant_bits 4", {"model.quantize": ABSENT}),
        (f"{SFT} --optim adamw_bnb_8bit", {"optim.name": "adamw_8bit"}),
        (f"{TRL} --optim paged_adamw_32bit", {"optim.name": "paged_adamw"}),
        (f"{TRL} --optim adamw_torch", {"optim.name": ABSENT}),
        (f"{SFT} --use_dora true", {"lora.kind": "dora"}),
        (f"{TRL} --use_peft --use_rslora", {"lora.kind": "rslora"}),
        (SFT, {"model.quantize": ABSENT, "lora.kind": ABSENT}),
    ],
)
def test_quantised_bases_and_kinds_of_adapters(line, expected):
    check(line, expected)


def test_ways_of_quantising_that_are_not_here_are_told():
    text = "has no equivalent: model.quantize is nf4 or int8, by bitsandbytes"
    for flags in ("--quant_method hqq --quant_bits 4", "--quant_bits 3", "--quant_bits 4 --bnb_4bit_quant_type fp4"):
        assert text in told(drafted(f"{SFT} {flags}"))


@pytest.mark.parametrize(
    ("line", "init", "spoken"),
    [
        (f"{SFT} --resume_from_checkpoint out/checkpoint-100", "out/checkpoint-100", "begins at step 0; lora.init"),
        (f"{TRL} --use_peft --resume_from_checkpoint=o/checkpoint-5", "o/checkpoint-5", "begins at step 0"),
        (f"{SFT} --adapters a --resume_from_checkpoint o/checkpoint-5", "a", "is not a checkpoint of tiercel"),
        (f"{SFT} --tuner_type full --resume_from_checkpoint o/checkpoint-5", None, "set model.path: o/checkpoint-5"),
        (f"{SFT} --resume_from_checkpoint true", None, "the same command resumes"),
        (f"{SFT} --resume_from_checkpoint", None, "the same command resumes"),
        (SFT, None, ""),
    ],
)
def test_a_checkpoint_that_the_command_goes_on_from(line, init, spoken):
    draft = drafted(line)
    assert draft.values.get("lora.init") == init
    assert spoken in told(draft) and ("resume_from_checkpoint" in told(draft)) == bool(spoken)


def test_quantised_weights_are_whole_on_each_rank():
    draft = drafted(f"{SFT} --quant_bits 4 --quant_method bnb --fsdp full_shard")
    assert draft.values["train.strategy"] == "ddp" and "fsdp2 cannot shard quantised weights" in told(draft)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["v_proj", "q_proj"], r"(.*\.)?(q_proj|v_proj)"),
        (r"model\.language_model.*(q|v)_proj", r"model\.language_model.*(q|v)_proj"),
        ("all-linear", "all"),
    ],
)
def test_an_adapter_to_go_on_from_is_described_by_its_own_config(tmp_path, targets, expected):
    config = {"r": 12, "lora_alpha": 48, "use_rslora": True, "lora_dropout": 0.05, "target_modules": targets}
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "adapter_config.json").write_text(json.dumps(config))
    values = drafted(f"{GRPO} --adapters sft --lora_rank 8", tmp_path / "run.sh").values
    found = {key: values[f"lora.{key}"] for key in ("init", "rank", "alpha", "kind", "dropout", "targets")}
    assert found == {"init": "sft", "rank": 12, "alpha": 48, "kind": "rslora", "dropout": 0.0, "targets": expected}


def test_an_adapter_that_is_elsewhere_is_to_be_described():
    assert "sft/adapter_config.json is not on this machine; write its" in told(drafted(f"{GRPO} --adapters sft"))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    (
        ("--bf16 true", "bfloat16"),
        ("", "bfloat16"),  # TRL's own default
        ("--bf16 false", "float16"),
        ("--fp16 true", "float16"),
    ),
)
def test_the_launchers_precision_is_that_of_a_script_without_one(flags, dtype):
    check(
        f"accelerate launch --mixed_precision fp16 trl/scripts/grpo.py {TRL.removeprefix('trl grpo ')} {flags}",
        {"model.dtype": dtype},
    )


def test_negations_of_switches():
    check(f"{TRL} --no_gradient_checkpointing", {"learner.gradient_checkpointing": False})
    assert values_of(f"{TRL} --no_gradient_checkpointing") == values_of(f"{TRL} --gradient_checkpointing false")
    assert "perhaps" not in told(drafted(f"{TRL} --no-gradient-checkpointing"))


@pytest.mark.parametrize("line", [f"{REC} --lora_r 8 --lora_alpha 128", f"{TRL} --lora_r 8 --lora_alpha 128"])
def test_an_adapter_that_is_not_switched_on_is_told(line):
    """As in the command of VLM-R1 163, which trains all weights."""
    draft = drafted(line)
    assert "lora.rank" not in draft.values
    assert any("without --use_peft" in note.text and note.is_change for note in draft.notes)
    assert "without --use_peft" not in told(drafted(f"{line} --use_peft true"))


def test_adapters_on_the_head_and_on_embeddings_are_told():
    draft = drafted(f"{TRL} --use_peft --lora_target_modules q_proj embed_tokens lm_head")
    assert draft.values["lora.targets"] == r"(.*\.)?(q_proj)"
    assert "lora.targets without embed_tokens and lm_head" in told(draft)

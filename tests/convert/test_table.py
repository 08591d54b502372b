"""The tables of the peers' flags."""

import pytest

from tests.convert.helpers import DPO, FACTORY, GRPO, REC, SFT, TRL, values_of
from tiercel.config.engines import NOT_SERVED, VISION_ADAPTERS
from tiercel.config.keys import every_key, keys_of
from tiercel.convert.table import KINDS, environment_row, environment_rows, rows_of
from tiercel.models.families.loading import FAMILIES

ALL = [
    *(
        row
        for method in KINDS
        for peer in ("ms-swift", "TRL", "LLaMA-Factory")
        for row in rows_of(peer, method).values()
    ),
    *rows_of("VLM-R1", "grpo").values(),
    *environment_rows(),
]


def test_every_key_of_a_table_is_in_the_schema():
    assert {row.key for row in ALL if row.key is not None} <= {key.path for key in every_key()}


@pytest.mark.parametrize("method", KINDS)
def test_a_key_that_takes_a_value_is_one_of_the_method(method):
    wrong = {
        (peer, row.name): row.key
        for peer in ("ms-swift", "TRL", "LLaMA-Factory")
        for row in rows_of(peer, method).values()
        if row.treatment == "set" and "@" in row.name and row.key not in keys_of(KINDS[method])
    }
    assert wrong == {}


def test_no_row_denies_a_family_that_exists():
    """What a table calls missing is missing: experts, sound, and families by their names."""
    denied = [row.told() for row in ALL if "not among the families" in row.told()]
    are_there = {"expert": any("moe" in name for name in FAMILIES), "sound": any("audio" in name for name in FAMILIES)}
    assert are_there["expert"]
    wrong = [text for text in denied for word, is_there in are_there.items() if word in text and is_there]
    assert wrong == [] and all("sound" in text for text in denied)
    assert {*VISION_ADAPTERS, *NOT_SERVED} <= {*FAMILIES}


def test_every_row_says_what_its_flag_means_and_where_to_go():
    assert [row.name for row in ALL if not row.meaning] == []
    assert [
        row.name for row in ALL if row.treatment in ("none", "nothing to do", "refused", "nearest") and not row.remark
    ] == []


def test_a_row_of_one_kind_of_training_comes_before_the_plain_one():
    assert rows_of("TRL", "sft")["learning_rate"].default == ("2e-5",)
    assert rows_of("TRL", "grpo")["learning_rate"].default == ("1e-6",)
    assert rows_of("ms-swift", "grpo")["weight_decay"].default == ("0.1",)  # its own, not transformers'
    assert environment_row("NCCL_SOCKET_IFNAME").name == "NCCL_*"
    assert rows_of("ms-swift", "simpo")["beta"].default == ("2.0",)  # of the method, in addition to that of all pairs
    assert rows_of("ms-swift", "kto")["simpo_gamma"].told() == "wanted margin of rewards: another method reads it"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            GRPO,
            {
                "rollout.temperature": 0.9,
                "optim.weight_decay": 0.1,
                "optim.betas": [0.9, 0.95],
                "learner.gradient_checkpointing": True,
                "lora.rank": 8,
                "lora.alpha": 32,
                "algorithm.kl.coef": 0.04,
                "rollout.max_new_tokens": 512,
                "optim.lr": 1e-4,
                "optim.schedule": "cosine",
                "train.seed": 42,
                "model.hub": "modelscope",
                "output": "output/m",
            },
        ),
        (f"{GRPO} --tuner_type full", {"optim.lr": 1e-5, "freeze": ["vision", "projector"], "lora.rank": None}),
        (SFT, {"optim.prompts_per_step": 16, "lora.dropout": 0.05, "rollout.temperature": None}),
        (
            f"{TRL} --use_peft",
            {"lora.rank": 16, "lora.alpha": 32, "algorithm.loss": "dapo", "optim.lr": 1e-6, "train.epochs": 3,
             "rollout.max_new_tokens": 512, "learner.gradient_checkpointing": True, "model.dtype": "bfloat16",
             "optim.betas": None},
        ),
        (DPO, {"dpo.loss": "sigmoid", "dpo.beta": None, "optim.prompts_per_step": 16, "lora.dropout": None,
               "rollout.temperature": None, "algorithm.kl.coef": None}),
        (DPO.replace("dpo", "orpo"), {"dpo.loss": "orpo", "dpo.sft_coef": None}),
        (DPO.replace("dpo", "simpo"), {"dpo.loss": "simpo", "dpo.beta": 2.0, "dpo.gamma": 1.0, "dpo.sft_coef": 1.0}),
        (DPO.replace("dpo", "cpo"), {"dpo.loss": "cpo", "dpo.gamma": None, "dpo.sft_coef": None}),
        (DPO.replace("dpo", "kto"), {"kto.beta": 0.1, "lora.dropout": None}),
        (DPO.replace("dpo", "rm"), {"ranking.margin": 0.0, "lora.dropout": None, "optim.lr": 1e-4}),
        (
            f"{DPO.replace('dpo', 'gkd')} --teacher_model org/t",
            {"teacher.path": "org/t", "teacher.hub": "modelscope", "teacher.divergence": "jsd",
             "teacher.rows_share": 0.5, "rollout.group_size": 1, "rollout.temperature": 0.9,
             "rollout.max_new_tokens": 512, "algorithm.normalise": "token", "algorithm.kl.coef": None},
        ),
        (TRL.replace("grpo", "dpo"), {"dpo.loss": "sigmoid", "optim.lr": 1e-6, "data.max_prompt_tokens": 1024,
                                      "model.reference": "device", "optim.prompts_per_step": 8}),
        (f"{TRL.replace('grpo', 'kto')} --use_peft", {"kto.beta": 0.1, "optim.lr": 1e-6, "lora.dropout": None}),
        (TRL.replace("grpo", "reward"), {"ranking.margin": 0.0, "optim.lr": 1e-4, "model.reference": None}),
        (TRL.replace("grpo", "cpo") + " --loss_type simpo", {"dpo.loss": "simpo", "dpo.gamma": 0.5, "dpo.beta": None,
                                                             "dpo.sft_coef": 1.0}),
        (
            f"{TRL.replace('grpo', 'gkd')} --teacher_model_name_or_path org/t",
            {"teacher.rows_share": 0.5, "rollout.max_new_tokens": 128, "rollout.temperature": 0.9, "optim.lr": 2e-5},
        ),
        (
            FACTORY,
            {"dpo.loss": "sigmoid", "lora.rank": 8, "lora.alpha": 16.0, "lora.targets": "language", "optim.lr": 5e-5,
             "data.max_prompt_tokens": 2048, "model.max_pixels": 589824, "learner.gradient_checkpointing": True,
             "train.epochs": 3, "optim.prompts_per_step": 8, "data.video.max_frames": 128, "lora.dropout": None},
        ),
        (
            f"{TRL.replace('grpo', 'distillation')} --teacher_model_name_or_path org/t --teacher_model_revision v2",
            {"teacher.rows_share": 0.0, "teacher.divergence": "reverse_kl", "rollout.max_new_tokens": 512,
             "optim.lr": 1e-6, "rollout.temperature": None, "data.max_prompt_tokens": None, "teacher.revision": "v2",
             "rollout.group_size": 1},
        ),
        (TRL.replace("grpo", "sft"), {"optim.lr": 2e-5, "data.max_prompt_tokens": 1024, "freeze": []}),
        (
            f"{REC} --use_peft true",
            {"lora.rank": 16, "lora.alpha": 32, "algorithm.kl.coef": 0.04, "rollout.top_k": 50, "optim.lr": 1e-6,
             "model.max_pixels": 12845056, "optim.schedule": "linear", "learner.gradient_checkpointing": None},
        ),
    ],
)  # fmt: skip
def test_defaults_of_the_peers_are_carried(line, expected):
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected

"""The peers' tables."""

import pytest

from tests.importing.helpers import GRPO, REC, SFT, TRL, values_of
from tiercel.config.keys import keys_of
from tiercel.importing.table import environment_row, environment_rows, rows_of

ALL = [
    *rows_of("ms-swift", "grpo").values(),
    *rows_of("ms-swift", "sft").values(),
    *rows_of("TRL", "grpo").values(),
    *rows_of("TRL", "sft").values(),
    *rows_of("TRL", "rloo").values(),
    *rows_of("VLM-R1", "grpo").values(),
    *environment_rows(),
]


def test_every_key_of_a_table_is_in_the_schema():
    assert {row.key for row in ALL if row.key is not None} <= set(keys_of("grpo"))


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

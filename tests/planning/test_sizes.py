"""Sizes of a model that the plan counts."""

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.planning.options import study


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        # q, k, v: 64, 32 and 32 rows with the columns of two more adapters; gate and up: 96 with those of one more
        (2, 2 * ((64 + 32 + 32) * 2 * 2 + (96 + 96) * 2)),
        (80, 2 * (96 + 96) * 80),  # three of rank 80 are not joined
    ],
)
def test_joined_adapters_are_wider(tiny_checkpoints, tmp_path, rank, expected):
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        lora={"rank": rank, "alpha": rank, "targets": "language"},
    )
    assert study(recipe, None).sizes.joined_adapter == expected

"""Operations that an update needs, against hand counts and the benchmarks' own, and the `mfu` from them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.flops import causal_pairs, decoder_shape, decoder_update, group_pairs, head_update, repeated_pairs
from tests.tiny_models import random_ids, tiny_policy, tiny_prompts
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.models.prompts import completion_positions
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.planning import devices
from tiercel.planning.devices import known_device
from tiercel.runs.directory import read_metrics
from tiercel.training.metrics import update_operations


def item_of(policy, lengths) -> PackItem:
    prompt = tiny_prompts(policy.family)[0]
    continuations = tuple(
        Continuation(
            token_ids_L=random_ids(policy.family, length, torch.Generator().manual_seed(0)),
            positions_DL=completion_positions(prompt.positions_DP, length),
            is_scored_L=torch.ones(length, dtype=torch.bool),
        )
        for length in lengths
    )
    return PackItem(prompt=prompt, continuations=continuations)


def test_pairs_of_tokens_by_hand():
    assert causal_pairs(3) == 1 + 2 + 3
    assert group_pairs(2, [1, 2]) == (1 + 2) + 3 + (3 + 4)
    assert repeated_pairs(2, [1, 2]) == (1 + 2 + 3) + (1 + 2 + 3 + 4)
    assert causal_pairs(4, window=2) == 1 + 2 + 2 + 2
    assert group_pairs(2, [1, 2], window=2) == (1 + 2) + 2 + (2 + 2)


def test_a_window_takes_away_the_pairs_that_it_hides(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["gemma3"])  # two of three layers have a window of 8
    item = item_of(policy, [3, 5])
    prompt = len(item.prompt.token_ids_P)
    seen = [*range(prompt), *range(prompt, prompt + 3), *range(prompt, prompt + 5)]  # how many tokens are before each
    hidden = sum(max(0, before + 1 - 8) for before in seen)
    with_windows = update_operations(policy, "split", pack([item]))
    policy.family.checkpoint.config.get_text_config().layer_types = ["full_attention"] * 3
    assert hidden > 0
    assert update_operations(policy, "split", pack([item])) - with_windows == 12 * 64 * 2 * hidden


def test_layers_without_attention_have_no_pairs(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen3_5"])  # one of four layers attends
    item = item_of(policy, [3, 5])
    before = update_operations(policy, "split", pack([item]))
    policy.family.checkpoint.config.get_text_config().layer_types = ["full_attention"] * 4
    pairs = group_pairs(len(item.prompt.token_ids_P), [3, 5])
    assert update_operations(policy, "split", pack([item])) - before == 12 * 64 * 3 * pairs


def test_operations_are_those_of_the_weights_by_hand(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_vl"])
    item = item_of(policy, [3, 5])
    config = policy.family.checkpoint.config.get_text_config()
    prompt = len(item.prompt.token_ids_P)
    frozen = trained = 0
    for name, weight in policy.family.language_model(policy.model).named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            frozen, trained = (
                (frozen, trained + weight.numel()) if "lora" in name else (frozen + weight.numel(), trained)
            )
    attention = 12 * config.hidden_size * config.num_hidden_layers
    head = 4 * 8 * config.hidden_size * config.vocab_size
    shared = (prompt + 8) * (4 * frozen + 6 * trained) + attention * group_pairs(prompt, [3, 5]) + head
    assert update_operations(policy, "split", pack([item])) == shared
    repeated = (2 * prompt + 8) * (4 * frozen + 6 * trained) + attention * repeated_pairs(prompt, [3, 5]) + head
    assert update_operations(policy, "repeated", pack([item, item])) == 2 * repeated


def test_operations_are_near_those_that_an_update_executes(tiny_checkpoints):
    """Executed ones have one product more in attention's backward pass, and fewer before the first adapters."""
    policy = tiny_policy(tiny_checkpoints["qwen2_vl"])
    item = item_of(policy, [20, 30])
    config = policy.family.checkpoint.config.get_text_config()
    shape = decoder_shape(config, rank_of(policy))
    pairs = group_pairs(len(item.prompt.token_ids_P), [20, 30])
    executed = decoder_update(shape, item.shared_length, pairs) + head_update(shape, 50)
    needed = update_operations(policy, "split", pack([item]))
    first = 2 * item.shared_length * config.hidden_size * (config.hidden_size + 2 * shape.key_heads * shape.head_size)
    first += 3 * 2 * item.shared_length * config.hidden_size * shape.lora_rank
    recomputed = 2 * pairs * config.hidden_size * config.num_hidden_layers
    assert needed == executed.total + first - recomputed


def rank_of(policy) -> int:
    (rank,) = {module.r["default"] for module in policy.model.modules() if hasattr(module, "lora_A")}
    return rank


def test_the_adapter_of_the_reference_does_not_count(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_vl"])
    item = item_of(policy, [3])
    before = update_operations(policy, "split", pack([item]))
    for module in policy.model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["reference"] = nn.Linear(1, 1)
    assert update_operations(replace(policy, reference_adapter="reference"), "split", pack([item])) == before


def test_a_card_is_known_by_the_name_that_torch_gives_it():
    assert known_device("NVIDIA H200").bandwidth == 4.8e12
    assert known_device("NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert known_device("NVIDIA H100 PCIe").flops == 756e12
    assert known_device("NVIDIA A100-SXM4-40GB").bandwidth == 1.555e12
    assert known_device("NVIDIA A100 80GB PCIe").name == "a100"
    assert known_device("Some other card") is None and known_device("CPU") is None


@pytest.fixture
def cpu_is_known(monkeypatch):
    card = replace(devices.DEVICES["h100"], sold_as="CPU", flops=1e9)
    monkeypatch.setattr(devices, "DEVICES", {"cpu": card})


def test_metrics_have_mfu_where_the_card_is_known(tiny_checkpoints, tmp_path, cpu_is_known):
    rows = write_rows(tmp_path)
    changes = {"train": {"steps": 1, "threads": 1}, "data": {"eval": None}}
    for run in (
        run_grpo(grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "grpo", **changes)),
        run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "sft", **changes)),
    ):
        assert read_metrics(run)[-1]["mfu"] > 0


def test_metrics_have_no_mfu_on_a_cpu(tiny_checkpoints, tmp_path):
    changes = {"train": {"steps": 1}, "data": {"eval": None}}
    run = run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **changes))
    assert "mfu" not in read_metrics(run)[-1]

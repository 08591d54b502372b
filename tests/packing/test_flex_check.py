"""Whether the attention can be compiled is known before anything is sampled."""

import pytest
import torch
from transformers import Qwen2Config

from tiercel.models.layers.attention_span import AttentionSpan
from tiercel.packing.attention import flex
from tiercel.packing.attention import flex as flex_check
from tiercel.packing.attention.block_mask import block_mask
from tiercel.packing.attention.flex import KERNELS, Kernels, flex_obstacle, kernel_options
from tiercel.packing.tree import groups_tree

CPU = torch.device("cpu")


def config(**changes) -> Qwen2Config:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return Qwen2Config(**shape | changes)


@pytest.fixture(autouse=True)
def nothing_known():
    flex_check._obstacle.cache_clear()


def test_what_compiles_has_no_obstacle():
    assert flex_obstacle(config(), torch.float32, CPU, learns=False) is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "No valid triton configs. OutOfMemoryError: out of resource: k Required: 114688 Hardware limit:101376",
            "a block needs 114,688 bytes of shared memory, and the card has 101,376",
        ),
        ("LoweringException: no kernel\nmore", "LoweringException: no kernel"),
        ("", "RuntimeError"),
    ],
)
def test_what_does_not_compile_is_told_with_the_limit(said, reason, monkeypatch):
    def refuses(*inputs):
        raise RuntimeError(said)

    monkeypatch.setattr(flex, "compiled_flex", lambda backend: refuses)
    told = flex_obstacle(config(), torch.bfloat16, CPU, learns=True)
    assert told == f"cannot be compiled for heads of 16 in torch.bfloat16 on cpu: {reason}"


def test_memory_that_runs_out_is_no_obstacle(monkeypatch):
    def refuses(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flex, "compiled_flex", lambda backend: refuses)
    with pytest.raises(torch.OutOfMemoryError):
        flex_obstacle(config(), torch.bfloat16, CPU, learns=True)


@pytest.mark.parametrize(("size", "largest"), [(16, 64), (64, 64), (80, 128), (192, 256), (256, 256), (257, 512)])
def test_kernels_are_those_of_the_next_size(size, largest):
    assert kernel_options(size, torch.bfloat16) == KERNELS[2][largest].options
    assert kernel_options(size, torch.float32) == KERNELS[4][largest].options


def test_larger_heads_have_pytorchs_own_kernels():
    assert kernel_options(513, torch.bfloat16) is None


def test_no_option_promises_what_the_mask_does_not_hold():
    """ROWS_GUARANTEED_SAFE would say that each query sees a key of the first block that its kernel visits, and gives
    NaN for one that sees none. Of two completions of 64 tokens after a prompt of 128, with a window of 8, only the
    first 7 of each see the prompt."""
    mask = block_mask(groups_tree((128, 64, 64)), CPU, attention_span=AttentionSpan(window=8))
    assert mask.kv_indices[0, 0, 1].tolist() == [0, 1]
    batch, query, key = torch.tensor(0), torch.arange(128, 256)[:, None], torch.arange(128)[None]
    assert mask.mask_mod(batch, batch, query, key).any(-1).sum() == 2 * 7
    for dtype in (torch.bfloat16, torch.float32):
        for size in (64, 128, 256, 512):
            assert "ROWS_GUARANTEED_SAFE" not in kernel_options(size, dtype)


def test_a_planted_promise_is_seen(monkeypatch):
    options = Kernels.options.fget
    monkeypatch.setattr(Kernels, "options", property(lambda self: options(self) | {"ROWS_GUARANTEED_SAFE": True}))
    with pytest.raises(AssertionError, match="ROWS_GUARANTEED_SAFE"):
        test_no_option_promises_what_the_mask_does_not_hold()

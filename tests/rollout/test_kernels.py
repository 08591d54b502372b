"""Attention over memory whose used part is given by tensors: the exact form by hand, and FlashAttention's calls.

The CPU has no FlashAttention for sequences of different lengths. `slow_flash` computes what PyTorch documents about it,
one sequence after the other. So the layouts of queries, keys and results are tested here, but the kernel needs a GPU.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tiercel.rollout.local import attention_kernels
from tiercel.rollout.local.attention_kernels import ExactKernel, FlashKernel, kernel_for
from tiercel.rollout.local.static_cache import BatchSize, FixedMemory

SIZE = 16
SCALE = 0.3
LENGTHS = (5, 1, 9)
LARGE = 200.0  # a score; bfloat16 has steps of 1 there


def slow_flash(
    query, key, value, query_bounds, key_bounds, most, longest, dropout, is_causal, is_debug, *, scale, seqused_k
) -> tuple[Tensor, ...]:
    """Queries (N, A, E), keys and values (T, J, E). Returns output (N, A, E) and log-sum-exp (A, N)."""
    assert query.stride(-1) == 1 and key.is_contiguous() and value.is_contiguous()
    assert all(each.dtype == torch.int32 for each in (query_bounds, key_bounds, seqused_k))
    assert dropout == 0 and not is_causal and not is_debug
    output, lse = torch.full_like(query, torch.nan), torch.full(query.shape[1::-1], torch.nan, dtype=query.dtype)
    repeats = query.shape[1] // key.shape[1]
    for i, used in enumerate(seqused_k.tolist()):
        queries = slice(*query_bounds[i : i + 2].tolist())
        start = int(key_bounds[i])
        assert start + used <= len(key) and used <= longest and queries.stop - queries.start <= most
        keys, values = (each[start : start + used].repeat_interleave(repeats, 1) for each in (key, value))
        scores = torch.einsum("nae,tae->ant", query[queries], keys) * scale
        lse[:, queries] = scores.logsumexp(-1) if used else torch.inf  # FlashAttention returns this if there is no key
        output[queries] = torch.einsum("ant,tae->nae", scores.softmax(-1), values)
    return output, lse, None, None, None


def filled(kernel, *, heads: int, queries: int, rows: list[int], tokens: int) -> tuple[FixedMemory, Tensor, Tensor]:
    """Return memory of which `tokens` of each row are in use, and random keys (J), with garbage in the unused
    places."""
    generator = torch.Generator().manual_seed(0)
    memory = FixedMemory(BatchSize(prompts=4, prompt_tokens=12, group_size=3, new_tokens=7), torch.device("cpu"))
    memory.begin(LENGTHS, 3)
    like = torch.zeros(1, heads, 1, SIZE, dtype=torch.float64)
    prompt, own = kernel.memory(like, 4, 12), kernel.memory(like, 12, 7)
    for held in (prompt, own):
        held.copy_(torch.randn(held.shape, generator=generator, dtype=torch.float64))
    memory.keep(rows)
    memory.places.used_R.fill_(tokens)
    return memory, prompt, own


@pytest.mark.parametrize(("heads", "queries"), [(2, 3), (4, 1), (1, 7)])
@pytest.mark.parametrize("rows", ([0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 6], [8]))
@pytest.mark.parametrize("kernel", (ExactKernel(), FlashKernel()))
def test_a_row_attends_to_its_prompt_and_its_own_tokens(monkeypatch, kernel, heads, queries, rows):
    monkeypatch.setattr(attention_kernels, "_flash", slow_flash)
    memory, prompt, own = filled(kernel, heads=heads, queries=queries, rows=rows, tokens=4)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(rows), heads, queries, SIZE, generator=generator, dtype=torch.float64)
    places = memory.places.of(len(rows))
    over_own = kernel.over_own(query, own[: len(rows)], own[: len(rows)], places, SCALE)
    over_prompts = kernel.over_prompts(query, prompt, prompt, places, SCALE)
    for i, row in enumerate(rows):
        seen = (own[i, :, :4], prompt[row // 3, :, : LENGTHS[row // 3]])
        for keys, (output, lse) in zip(seen, (over_own, over_prompts), strict=True):
            scores = query[i] @ keys.mT * SCALE
            torch.testing.assert_close(output[i], scores.softmax(-1) @ keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[i].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", (1, 3, 4, 5, 9, 12, 30))
@pytest.mark.parametrize("kernel", (ExactKernel(), FlashKernel()))
def test_a_window_ends_in_the_prompt_or_in_the_rows_own_tokens(monkeypatch, kernel, window):
    """Four new tokens after prompts of 5, 1 and 9."""
    monkeypatch.setattr(attention_kernels, "_flash", slow_flash)
    rows = [0, 2, 3, 7, 8]
    memory, prompt, own = filled(kernel, heads=2, queries=3, rows=rows, tokens=4)
    query = torch.randn(5, 2, 3, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    places = memory.places.of(len(rows)).within(window)
    own_output, own_lse = kernel.over_own(query, own[:5], own[:5], places, SCALE)
    output, lse = kernel.over_prompts(query, prompt, prompt, places, SCALE)
    for i, row in enumerate(rows):
        sequence = torch.cat([prompt[row // 3, :, : LENGTHS[row // 3]], own[i, :, :4]], dim=1)
        keys = sequence[:, max(0, sequence.shape[1] - window) :]
        expected = (query[i] @ keys.mT * SCALE).softmax(-1) @ keys
        weight = torch.sigmoid(own_lse[i].double() - lse[i].double())[..., None]
        torch.testing.assert_close(torch.lerp(output[i], own_output[i], weight), expected, rtol=1e-5, atol=1e-5)
        assert bool(lse[i].isneginf().all()) == (window <= 4)


@pytest.mark.parametrize("window", (1, 3, 4, 5, 9, 12, 30))
@pytest.mark.parametrize("kernel", (ExactKernel(), FlashKernel()))
def test_rows_that_came_back_see_as_far_as_their_own_tokens_let_them(monkeypatch, kernel, window):
    """One to five new tokens, which end at the same place, after prompts of 5, 1 and 9."""
    monkeypatch.setattr(attention_kernels, "_flash", slow_flash)
    rows, used = [0, 2, 3, 7, 8], [1, 5, 4, 2, 3]
    memory, prompt, own = filled(kernel, heads=2, queries=3, rows=rows, tokens=5)
    memory.begin(LENGTHS, 3, turn_tokens=1)
    memory.length, memory.unused = 5, [0] * 9
    memory.keep(rows)
    memory.unused = [5 - each for each in used]
    memory.keep(range(5))
    query = torch.randn(5, 2, 3, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    places = memory.places.of(len(rows)).within(window)
    own_output, own_lse = kernel.over_own(query, own[:5], own[:5], places, SCALE)
    output, lse = kernel.over_prompts(query, prompt, prompt, places, SCALE)
    for i, row in enumerate(rows):
        sequence = torch.cat([prompt[row // 3, :, : LENGTHS[row // 3]], own[i, :, 5 - used[i] : 5]], dim=1)
        keys = sequence[:, max(0, sequence.shape[1] - window) :]
        expected = (query[i] @ keys.mT * SCALE).softmax(-1) @ keys
        weight = torch.sigmoid(own_lse[i].double() - lse[i].double())[..., None]
        torch.testing.assert_close(torch.lerp(output[i], own_output[i], weight), expected, rtol=1e-5, atol=1e-5)
        assert bool(lse[i].isneginf().all()) == (window <= used[i])


def test_scores_of_half_precision_are_not_rounded():
    """Two scores near 200 that differ by less than a step."""
    query = torch.tensor([LARGE, 1.0]).bfloat16().view(1, 1, 1, 2)
    key = torch.tensor([[1.0, 0.0], [1.0, 0.25]]).bfloat16().view(1, 1, 2, 2)
    _, lse = attention_kernels._attention(query, key, key, torch.tensor([0]), torch.tensor([2]), 1.0)
    assert float(lse) == pytest.approx(LARGE + torch.tensor([0.0, 0.25]).logsumexp(0).item(), abs=1e-4)


def test_flash_is_called_as_pytorch_defines_it():
    """The shapes that PyTorch's own definition of the operator gives for its arguments."""
    rows, heads, queries = 6, 2, 3
    room = BatchSize(prompts=3, prompt_tokens=256, group_size=2, new_tokens=64)
    places = FixedMemory(room, torch.device("meta")).places.of(rows)
    query = torch.empty(rows, heads, queries, 64, device="meta", dtype=torch.bfloat16)
    prompt, own = FlashKernel().memory(query, 3, 256), FlashKernel().memory(query, rows, 64)
    for output, lse in (
        FlashKernel().over_prompts(query, prompt, prompt, places, SCALE),
        FlashKernel().over_own(query, own, own, places, SCALE),
    ):
        assert output.shape == query.shape and output.dtype == torch.bfloat16
        assert lse.shape == query.shape[:3] and lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "kernel"),
    [
        (torch.bfloat16, 128, (9, 0), FlashKernel),
        (torch.float16, 64, (8, 0), FlashKernel),
        (torch.float32, 128, (9, 0), ExactKernel),
        (torch.bfloat16, 100, (9, 0), ExactKernel),
        (torch.bfloat16, 512, (9, 0), ExactKernel),
        (torch.float16, 64, (7, 5), ExactKernel),
    ],
)
def test_a_kernel_for_every_device(monkeypatch, dtype, size, capability, kernel):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        assert isinstance(kernel_for(torch.empty(1, 2, 3, size, device="cuda", dtype=dtype)), kernel)
    assert isinstance(kernel_for(torch.empty(1, 2, 3, size, dtype=dtype)), ExactKernel)

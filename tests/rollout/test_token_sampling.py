"""The counter-based draws: what they depend on, that they follow the distribution, and the two filters, by hand."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._dynamo.utils import counters

from tests.rollout.test_local import PARAMS
from tiercel.config.schema import Model
from tiercel.models.families.loading import load_family
from tiercel.rollout import token_sampling
from tiercel.rollout.token_sampling import TokenDraw, filtered, race, sampling_seed, token_keys

VOCABULARY = 400
CPU = torch.device("cpu")
MASK, WORD = (1 << 64) - 1, (1 << 32) - 1


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 (rows, vocabulary): minus the logarithm of the race's noise."""
    return token_sampling._Noise(seeds, positions, token_keys(vocabulary, CPU)).of(slice(0, vocabulary)).log_().neg_()


def splitmix(value: int) -> int:
    """splitmix64's finaliser on plain integers (Steele et al. 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def token_key(token: int) -> int:
    """murmur3's finaliser on plain integers."""
    word = token + 1
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)


def noise_of(seed: int, position: int, token: int) -> float:
    """One number of the noise, in Python's integers and doubles."""
    row = splitmix((splitmix(seed) + position) & MASK)
    word = ((token_key(token) ^ (row & WORD)) * ((row >> 32) | 1)) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return -math.log(-math.log1p(-((word >> 1) + 0.5) / 2**31))


def test_noise_equals_the_definition():
    seeds = torch.tensor([0, 1, 2**48 - 1, 123456789])
    positions = torch.tensor([0, 7, 255, 3])
    noise = gumbel_noise(seeds, positions, 50)
    assert noise.shape == (4, 50) and noise.dtype == torch.float32
    expected = [
        [noise_of(seed, position, token) for token in range(50)]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_row_is_the_same_alone_and_in_any_batch():
    seeds, positions = torch.arange(40, 60), torch.arange(20) % 3
    together = gumbel_noise(seeds, positions, 33)
    for row in (0, 7, 19):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 33)[0], together[row])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 33), together[order])


def test_a_larger_vocabulary_keeps_the_noise_of_the_smaller():
    seeds, positions = torch.tensor([5]), torch.tensor([2])
    assert torch.equal(gumbel_noise(seeds, positions, 100)[:, :40], gumbel_noise(seeds, positions, 40))


def test_noise_is_always_finite():
    noise = gumbel_noise(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 1000)
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)  # Euler's constant
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_no_two_tokens_share_a_key():
    assert len(token_keys(152_064, CPU).unique()) == 152_064


@pytest.mark.parametrize("elements", (1, 7, 40, 2**16))
def test_a_race_by_blocks_is_the_argmax_of_logits_plus_gumbel_noise(monkeypatch, elements):
    monkeypatch.setattr(token_sampling, "ELEMENTS_IN_CACHE", elements)
    seeds, positions = torch.tensor([3, 4, 5, 99]), torch.tensor([0, 1, 2, 3])
    logits = torch.randn(4, 53, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 50]] = -torch.inf
    keys, expected = token_keys(53, CPU), (logits + gumbel_noise(seeds, positions, 53)).argmax(-1)
    assert torch.equal(race(logits.exp(), seeds, positions, keys), expected)
    assert torch.equal(race(logits.exp().T.contiguous().T, seeds, positions, keys), expected)


def test_flat_logits_give_every_token_its_share():
    counts = torch.zeros(997)
    for position in range(40):
        seeds = sampling_seed(1, position) + torch.arange(2000)
        drawn = race(torch.ones(2000, 997), seeds, torch.full((2000,), position), token_keys(997, CPU))
        counts += torch.bincount(drawn, minlength=997)
    expected = 80_000 / 997
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 996) < 4 * math.sqrt(2 * 996)


def draws(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (probabilities.log() + gumbel_noise(seeds, positions, len(probabilities))).argmax(-1)


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.029, 0.001])
    # consecutive seeds and positions, as a run has them
    seeds = (sampling_seed(0, 17) + torch.arange(2000)).repeat_interleave(100)
    positions = torch.arange(100).repeat(2000)
    counts = torch.bincount(draws(probabilities, seeds, positions), minlength=6)
    expected = 200_000 * probabilities
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 25.7  # 5 degrees of freedom, one in ten thousand


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1), (1, -1)])
def test_neighbouring_draws_are_independent(seed_step, position_step):
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    seeds = torch.arange(1000).repeat_interleave(50)
    positions = 1 + torch.arange(50).repeat(1000)
    first = draws(probabilities, seeds, positions)
    second = draws(probabilities, seeds + seed_step, positions + position_step)
    counts = torch.bincount(first * 4 + second, minlength=16)
    expected = 50_000 * (probabilities[:, None] * probabilities).flatten()
    assert float(((counts - expected) ** 2 / expected).sum()) < 44.3  # 15 degrees of freedom, one in ten thousand


def test_seeds_of_prompts_are_apart():
    seeds = [sampling_seed(run, index) for run in range(4) for index in range(500)]
    assert all(0 <= seed < 2**48 for seed in seeds)
    nearest = sorted(seeds)
    assert min(b - a for a, b in pairwise(nearest)) > 64  # no two groups share a seed
    by_hand = splitmix((splitmix((3 * 0x9E3779B97F4A7C15 + 5) & MASK) + 1) & MASK) >> 16
    assert sampling_seed(3, 5) == by_hand
    assert sampling_seed(2**63, 10**12) != sampling_seed(0, 10**12)


def kept(logits: list[float], top_k: int, top_p: float) -> list[bool]:
    return filtered(torch.tensor([logits]), top_k, top_p)[0].isfinite().tolist()


def test_top_k_by_hand():
    logits = [1.0, 4.0, 3.0, 2.0]
    assert kept(logits, 1, 1.0) == [False, True, False, False]
    assert kept(logits, 2, 1.0) == [False, True, True, False]
    assert kept(logits, 4, 1.0) == kept(logits, 0, 1.0) == kept(logits, 9, 1.0) == [True] * 4
    assert kept([1.0, 2.0, 2.0, 0.0], 1, 1.0) == [False, True, True, False]  # equal ones are kept or dropped together


def test_top_p_by_hand():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().tolist()
    assert kept(logits, 0, 0.45) == [False, True, False, False]
    assert kept(logits, 0, 0.55) == [False, True, False, True]  # the token that crosses the bound is kept
    assert kept(logits, 0, 0.79) == [False, True, False, True]
    assert kept(logits, 0, 0.81) == [True, True, False, True]
    assert kept(logits, 0, 0.96) == kept(logits, 0, 1.0) == [True] * 4
    assert kept(logits, 0, 1e-9) == [False, True, False, False]  # the likeliest is never lost


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, 2, 0.56) == [True, False, False, False]  # 4/7 of the two that are left
    assert kept(logits, 2, 0.58) == [True, True, False, False]


def test_filters_leave_the_other_logits_as_they_are():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(filtered(logits, 0, 1.0), logits)
    result = filtered(logits, 5, 0.9)
    assert torch.equal(result[result.isfinite()], logits[result.isfinite()])
    assert bool((result.isfinite().sum(-1) >= 1).all())


@pytest.fixture
def draw(tiny_checkpoints) -> TokenDraw:
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    return TokenDraw(PARAMS, family, VOCABULARY, torch.device("cpu"))


def test_rows_may_be_at_different_places_of_their_completions(draw):
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.tensor([3, 3, 5, 3]), torch.tensor([0, 7, 7, 7])
    together, _ = draw(logits.clone(), seeds, positions, None)
    for row in range(4):
        here = slice(row, row + 1)
        alone, _ = draw(logits[here].clone(), seeds[here], positions[here], None)
        assert int(alone) == int(together[row])


def test_only_rows_that_are_early_cannot_end_their_turn(draw):
    logits = torch.zeros(3, VOCABULARY)
    logits[:, draw.vocabulary.end_ids] = 20.0
    seeds, positions = torch.arange(3), torch.tensor([4, 9, 0])
    drawn, logprobs = draw(logits.clone(), seeds, positions, torch.tensor([True, False, True]))
    assert draw.ends(drawn).tolist() == [False, True, False]
    free, of_free = draw(logits.clone(), seeds, positions, None)
    assert draw.ends(free).tolist() == [True, True, True]
    assert logprobs[1] == of_free[1]  # to the bit
    assert bool((logprobs[[0, 2]] < -15).all())  # under the distribution with end tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_draws_are_those_of_plain_operations(tiny_checkpoints, monkeypatch, dtype):
    """One graph serves batches of all sizes and several draws with the same parameters."""
    monkeypatch.setattr(token_sampling, "_block_width", lambda rows, device: 2**30)  # as on a GPU
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    generator = torch.Generator().manual_seed(0)
    for changed in ({}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}, {"greedy": True}):
        torch._dynamo.reset()
        counters.clear()
        params = replace(PARAMS, **changed)
        plain, compiled = (TokenDraw(params, family, VOCABULARY, CPU, backend) for backend in (None, "aot_eager"))
        for rows in (6, 3, 2, 7):
            logits = (3 * torch.randn(rows, VOCABULARY, generator=generator)).to(dtype)
            seeds, positions = torch.arange(rows) + 11, torch.full((rows,), rows)
            for is_early in (None, torch.arange(rows) % 2 == 0):
                given = seeds, positions, is_early
                for found, right in zip(compiled(logits.clone(), *given), plain(logits.clone(), *given), strict=True):
                    assert torch.equal(found, right)
        assert counters["stats"]["unique_graphs"] == 2  # with rows that must not end their turn, and without


def test_a_draw_that_cannot_be_compiled_is_made_without(tiny_checkpoints):
    def refuses(graph, inputs):
        raise RuntimeError("no C compiler")

    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    logits, given = torch.randn(2, VOCABULARY), (torch.arange(2), torch.arange(2), None)
    right = TokenDraw(PARAMS, family, VOCABULARY, CPU)(logits.clone(), *given)
    with pytest.warns(RuntimeWarning, match="continues uncompiled"):
        found = TokenDraw(PARAMS, family, VOCABULARY, CPU, refuses)(logits.clone(), *given)
    assert torch.equal(found[0], right[0])
    with warnings.catch_warnings(action="error"):  # the next batch neither tries nor tells it again
        TokenDraw(PARAMS, family, VOCABULARY, CPU, refuses)(logits.clone(), *given)

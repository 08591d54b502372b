"""Noise on embeddings: a row's noise does not depend on what is next to it."""

import math

import pytest
import torch

from tiercel.packing.pass_options import EmbeddingNoise
from tiercel.packing.tree import groups_tree

ALPHA, WIDTH = 5.0, 16
FIRST, SECOND = (4, 5), (3, 13)  # tokens of a prompt and its completion
NOTHING_TH = torch.zeros(0, WIDTH)


def test_noise_is_even_within_its_bound():
    long = groups_tree((1, 499))
    noise_TH = EmbeddingNoise(alpha=ALPHA, seeds=(7,)).of(long, NOTHING_TH, WIDTH)
    bound = ALPHA / math.sqrt(500 * WIDTH)
    assert 0.99 * bound < noise_TH.abs().max() <= bound
    assert abs(noise_TH.mean()) < 0.02 * bound
    assert noise_TH.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)  # of a uniform distribution


def test_noise_of_a_row_does_not_depend_on_the_pack():
    together_TH = EmbeddingNoise(alpha=ALPHA, seeds=(7, 8)).of(groups_tree(FIRST, SECOND), NOTHING_TH, WIDTH)
    alone_TH = EmbeddingNoise(alpha=ALPHA, seeds=(8,)).of(groups_tree(SECOND), NOTHING_TH, WIDTH)
    assert torch.equal(together_TH[9:], alone_TH)
    other_TH = EmbeddingNoise(alpha=ALPHA, seeds=(9,)).of(groups_tree(SECOND), NOTHING_TH, WIDTH)
    assert not torch.equal(other_TH, alone_TH)


def test_inputs_of_layers_and_an_empty_pass_have_none():
    noise_TH = EmbeddingNoise(alpha=ALPHA, seeds=(7,)).of(groups_tree(FIRST), torch.zeros(0, WIDTH + 3), WIDTH)
    assert bool((noise_TH[:, WIDTH:] == 0).all()) and bool((noise_TH[:, :WIDTH] != 0).all())
    assert not EmbeddingNoise(alpha=ALPHA, seeds=()).of(groups_tree(FIRST), NOTHING_TH, WIDTH).any()

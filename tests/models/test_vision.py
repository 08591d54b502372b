"""Vision features: each picture is computed once, kept within a budget of bytes, and never taken from another
policy."""

import pytest
import torch

from tests.tiny_models import counting_store, move_adapter, noise_image, tiny_policy
from tiercel.config.schema import Lora
from tiercel.packing.forward import PackedPolicy


@pytest.fixture(scope="module")
def frozen(tiny_checkpoints):
    return tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)


@pytest.fixture(scope="module")
def trained(tiny_checkpoints):
    return tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets="all"), noise=0.1)


@pytest.fixture(scope="module")
def pictures(frozen):
    """Three pictures of 56 x 56: four rows of 64 numbers each."""
    return [frozen.family.encode_image(noise_image(56, 56, seed)) for seed in range(3)]


BYTES = 4 * 64 * 4


def test_each_picture_is_computed_once(frozen, pictures):
    a, b, c = pictures
    store = counting_store(frozen, 0)
    first = store.features([a, b, a])
    assert store.policy.pictures == 2
    assert torch.equal(first[:4], first[8:])
    again = store.features([b, c])
    assert store.policy.pictures == 3
    assert torch.equal(again[:4], first[4:8])
    torch.testing.assert_close(first, torch.cat(frozen.vision_features([a, b, a])))


def test_equal_pixels_are_one_picture(frozen, pictures):
    store = counting_store(frozen, 0)
    store.features([pictures[0]])
    store.features([frozen.family.encode_image(noise_image(56, 56, 0))])
    assert store.policy.pictures == 1


def test_no_images_no_features(frozen):
    store = counting_store(frozen, 0)
    assert store.features([]) is None
    store.end_step()
    assert store.policy.pictures == 0


def test_without_a_budget_a_step_keeps_nothing(frozen, pictures):
    store = counting_store(frozen, 0)
    store.features(pictures)
    store.end_step()
    store.features(pictures)
    assert store.policy.pictures == 6


def test_within_a_budget_the_least_recently_used_goes_first(frozen, pictures):
    a, b, c = pictures
    store = counting_store(frozen, 2 * BYTES)
    store.features([a, b])
    store.features([a])  # so b is the oldest
    store.features([c])
    store.end_step()
    assert store.policy.pictures == 3
    store.features([a, c])
    assert store.policy.pictures == 3
    store.features([b])
    assert store.policy.pictures == 4


@pytest.mark.parametrize(("budget", "recomputed"), [(3 * BYTES, 0), (3 * BYTES - 1, 1), (BYTES, 2), (BYTES - 1, 3)])
def test_the_budget_counts_bytes(frozen, pictures, budget, recomputed):
    store = counting_store(frozen, budget)
    store.features(pictures)
    store.end_step()
    for picture in pictures[::-1]:
        store.features([picture])
    assert store.policy.pictures == 3 + recomputed


def test_a_step_may_hold_more_than_the_budget(frozen, pictures):
    store = counting_store(frozen, 1)
    store.features(pictures)
    store.features(pictures)
    assert store.policy.pictures == 3


@pytest.mark.parametrize("cache_bytes", (0, 10**6))
def test_features_have_the_same_bytes_whatever_was_computed_before(frozen, pictures, cache_bytes):
    """A resumed run starts with an empty store, or with a step that is sampled, and must continue with the same
    numbers."""
    a, b, c = pictures
    warm, cold = counting_store(frozen, cache_bytes), counting_store(frozen, cache_bytes)
    warm.features([a, b])
    assert torch.equal(warm.features([b, c]), cold.features([b, c]))


def test_features_have_no_gradient_where_the_tower_is_frozen(frozen, pictures):
    assert frozen.vision_is_frozen
    store = counting_store(frozen, 0)
    assert not store.features(pictures, with_gradient=True).requires_grad
    store.features(pictures)
    assert store.policy.pictures == 3


@pytest.mark.parametrize("targets", ("vision", "projector", "all"))
def test_a_trained_tower_gets_a_gradient(tiny_checkpoints, pictures, targets):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=targets), noise=0.1)
    assert not policy.vision_is_frozen
    store = counting_store(policy, 0)
    assert not store.features(pictures).requires_grad
    features = store.features(pictures, with_gradient=True)
    assert store.policy.pictures == 6
    features.square().sum().backward()
    moved = [name for name, parameter in policy.trained_parameters().items() if parameter.grad is not None]
    assert moved and all(".visual." in name for name in moved)


def test_a_trained_tower_is_forgotten_after_each_step(tiny_checkpoints, pictures):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets="all"), noise=0.1)
    store = counting_store(policy, 10**9)
    before = store.features(pictures)
    assert torch.equal(store.features(pictures), before)
    move_adapter(policy, 0.1, seed=2)
    store.end_step()
    after = store.features(pictures)
    assert float((after - before).abs().max()) > 1e-3
    torch.testing.assert_close(after, torch.cat([policy.vision_features([p])[0].detach() for p in pictures]))


def test_the_reference_sees_through_its_own_tower(trained, pictures):
    store = counting_store(trained, 0)
    with torch.no_grad(), trained.as_reference():
        expected = torch.cat(trained.vision_features(pictures))
    own = store.features(pictures)  # the sampler has computed them already
    assert float((own - expected).abs().max()) > 1e-3
    with trained.as_reference():
        torch.testing.assert_close(store.features(pictures, of_reference=True), expected)
        assert store.policy.pictures == 6
        store.features(pictures, of_reference=True)
        assert store.policy.pictures == 6
    assert torch.equal(store.features(pictures), own)


def test_a_frozen_tower_is_shared_with_the_reference(frozen, pictures):
    store = counting_store(frozen, 0)
    own = store.features(pictures)
    with frozen.as_reference():
        assert torch.equal(store.features(pictures, of_reference=True), own)
    assert store.policy.pictures == 3


def test_activation_checkpointing_asks_no_gradient_of_a_frozen_tower(tiny_checkpoints, pictures):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    PackedPolicy(policy, "split", True).train()
    (features, *_) = policy.vision_features(pictures)
    assert not features.requires_grad


def test_a_picture_of_several_microbatches_goes_through_a_trained_tower_once(trained, pictures):
    a, b, _ = pictures
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    parameters = [p for p in trained.trained_parameters().values() if p.requires_grad]

    def gradient() -> torch.Tensor:
        found = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        trained.model.zero_grad()
        return found

    whole = torch.cat(trained.vision_features([a, b]))
    (whole * weights).sum().backward()
    (torch.cat(trained.vision_features([b])) * weights[:4]).sum().backward()
    expected = gradient()
    store = counting_store(trained, 0)
    with store.update([[a, b], [b]]):
        (store.features([a, b], with_gradient=True) * weights).sum().backward()
        (store.features([b], with_gradient=True) * weights[:4]).sum().backward()
        store.backward()
    assert store.policy.pictures == 2
    found = gradient()
    assert float((found - expected).norm() / expected.norm()) < 1e-5

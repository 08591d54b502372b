"""Every strategy makes the same updates as one process, and none hangs, whatever is on which rank."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.distributed.worker import STEPS, kinds_of
from tests.forked import Nursery
from tests.tiny_models import FAMILY_NAMES
from tests.training.test_loops import write_rows

pytestmark = pytest.mark.scale

WORLDS = (("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("hsdp", 4), ("zero3", 2), ("zero3-offload", 2))
WORLDS += (("context 2", 2), ("context 4", 4))


RANKS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


@cache
def nursery() -> Nursery:
    """Return what ranks are forked from, for as long as the tests run."""
    return Nursery(["tests.distributed.worker", "tests.distributed.shards_worker", "deepspeed"], RANKS)


def run_ranks(count: int, *arguments: str, timeout: float = 1000) -> str:
    """Run the worker on ranks, and return what they print. They end by themselves: their collectives wait three minutes
    at most."""
    return forked.run_ranks(nursery(), count, "tests.distributed.worker", arguments, timeout)


@pytest.fixture(scope="module")
def shared(tiny_checkpoints, tmp_path_factory) -> list[str]:
    """Arguments that all launches share."""
    root = tmp_path_factory.mktemp("scale")
    rows = write_rows(root)
    return ["--checkpoints", str(next(iter(tiny_checkpoints.values())).parent), "--rows", str(rows)]


@pytest.fixture(scope="module")
def alone(shared, tmp_path_factory) -> dict[str, torch.Tensor]:
    """Gradients of one process."""
    out = tmp_path_factory.mktemp("alone") / "gradients.safetensors"
    run_ranks(1, "equal", "--strategy", "single", "--out", str(out), *shared)
    return load_file(out)


@pytest.mark.parametrize(("strategy", "count"), WORLDS)
def test_gradients_before_clipping_are_those_of_one_process(strategy, count, shared, alone, tmp_path):
    out = tmp_path / "gradients.safetensors"
    run_ranks(count, "equal", "--strategy", strategy, "--out", str(out), *shared)
    found = load_file(out)
    assert (
        set(found)
        == set(alone)
        == {
            f"{family}.{kind}.{step}"
            for family in FAMILY_NAMES
            for kind in kinds_of(family, "adapter")
            for step in range(STEPS)
        }
    )
    errors = {name: float((found[name] - alone[name]).norm() / alone[name].norm()) for name in alone}
    assert all(bool(gradient.any()) for gradient in alone.values())
    worst = max(errors, key=lambda name: errors[name])
    print(f"{strategy} x{count}: worst relative error {errors[worst]:.1e} ({worst})")
    assert errors[worst] < 1e-5, errors


FULL = (
    ("ddp", "all"),
    ("fsdp2", "all"),
    ("fsdp2", "adapter of the tower"),
    ("fsdp2", "all, with a penalty"),
    ("ddp", "adapter, tower whole"),
    ("ddp", "adapter on 4 bits"),
    ("ddp", "lengths too"),
    ("context 2", "all"),
    ("context 2, fsdp2", "all"),
    ("context 2, fsdp2", "adapter, recomputed in part"),
    ("context 2, zero3", "language"),
    ("fsdp2", "adapter, tower whole"),
    ("fsdp2", "adapter, recomputed in part"),
    ("zero3", "adapter, recomputed in part"),
    ("zero2", "language"),
    ("zero3", "language"),
)


@pytest.fixture(scope="module")
def full_alone(shared, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of one process, by what is trained."""
    root = tmp_path_factory.mktemp("full")
    found = {}
    for number, trained in enumerate(sorted({trained for _, trained in FULL})):
        out = root / f"{number}.safetensors"
        run_ranks(1, "equal", "--strategy", "single", "--trained", trained, "--out", str(out), *shared)
        found[trained] = load_file(out)
    return found


@pytest.mark.parametrize(("strategy", "trained"), FULL)
def test_gradients_of_other_parts_are_those_of_one_process_too(strategy, trained, shared, full_alone, tmp_path):
    out = tmp_path / "gradients.safetensors"
    run_ranks(2, "equal", "--strategy", strategy, "--trained", trained, "--out", str(out), *shared)
    found, alone = load_file(out), full_alone[trained]
    errors = {name: float((found[name] - alone[name]).norm() / alone[name].norm()) for name in alone}
    print(f"{strategy} x2, {trained}: worst relative error {max(errors.values()):.1e}")
    assert set(found) == set(alone) and max(errors.values()) < 1e-5, errors


def test_copies_of_a_model_that_is_trained_whole_stay_equal(shared, full_alone, tmp_path):
    """Two copies of two ranks each: the gradients of all four are summed, and a share's norm counts once."""
    out = tmp_path / "gradients.safetensors"
    run_ranks(4, "equal", "--strategy", "hsdp", "--trained", "all", "--out", str(out), *shared)
    found, alone = load_file(out), full_alone["all"]
    errors = {name: float((found[name] - alone[name]).norm() / alone[name].norm()) for name in alone}
    print(f"hsdp x4, all: worst relative error {max(errors.values()):.1e}")
    assert set(found) == set(alone) and max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("strategy", ("ddp", "fsdp2", "zero3"))
def test_no_arrangement_of_rows_over_two_ranks_hangs(strategy, shared):
    printed = run_ranks(2, "arrangements", "--strategy", strategy, *shared)
    assert printed.count("learnt from") == 9 + 4

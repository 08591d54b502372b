"""Every strategy makes the same updates as one process, and none hangs, whatever is on which rank."""

from collections.abc import Callable, Sequence
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

BOTH = ("qwen2_5_vl", "qwen3_5_moe")  # windows, delta nets and experts, and all that is learnt from
OTHERS = tuple(name for name in FAMILY_NAMES if name not in BOTH)
STRATEGIES = (("ddp", 2), ("fsdp2", 2), ("zero3", 2), ("context 2", 2))  # with the other families too
WORLDS = (*STRATEGIES, ("ddp", 4), ("hsdp", 4), ("zero3-offload", 2), ("context 4", 4))


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
def alone(shared, tmp_path_factory) -> Callable[..., dict[str, torch.Tensor]]:
    """Gradients of one process, by what is trained and the families, computed when a test asks for them."""
    root = tmp_path_factory.mktemp("alone")

    @cache
    def gradients(trained: str, *families: str) -> dict[str, torch.Tensor]:
        out = root / f"{len(list(root.iterdir()))}.safetensors"
        words = ("--strategy", "single", "--trained", trained, "--families", *families, "--out", str(out))
        run_ranks(1, "equal", *words, *shared)
        return load_file(out)

    return gradients


@pytest.fixture
def require_equal(shared, alone, tmp_path) -> Callable[..., set[str]]:
    """Require that ranks have the gradients of one process. Returns the gradients' names."""

    def require(strategy: str, count: int, trained: str = "adapter", families: Sequence[str] = BOTH[:1]) -> set[str]:
        out = tmp_path / "gradients.safetensors"
        words = ("--strategy", strategy, "--trained", trained, "--families", *families, "--out", str(out))
        run_ranks(count, "equal", *words, *shared)
        found, right = load_file(out), alone(trained, *families)
        errors = {name: float((found[name] - right[name]).norm() / right[name].norm()) for name in right}
        worst = max(errors, key=lambda name: errors[name])
        print(f"{strategy} x{count}, {trained}: worst relative error {errors[worst]:.1e} ({worst})")
        assert set(found) == set(right) and errors[worst] < 1e-5, errors
        assert all(bool(gradient.any()) for gradient in right.values())
        return set(found)

    return require


@pytest.mark.parametrize(
    ("families", "strategy", "count"),
    (
        *(pytest.param(BOTH, *world, id=f"{world[0]}-{world[1]}") for world in WORLDS),
        *(pytest.param(OTHERS, *world, id=f"{world[0]}-{world[1]}, others") for world in STRATEGIES),
    ),
)
def test_gradients_before_clipping_are_those_of_one_process(families, strategy, count, require_equal):
    assert require_equal(strategy, count, families=families) == {
        f"{family}.{kind}.{step}"
        for family in families
        for kind in kinds_of(family, "adapter")
        for step in range(STEPS)
    }


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


@pytest.mark.parametrize(("strategy", "trained"), FULL)
def test_gradients_of_other_parts_are_those_of_one_process_too(strategy, trained, require_equal):
    require_equal(strategy, 2, trained)


def test_copies_of_a_model_that_is_trained_whole_stay_equal(require_equal):
    """Two copies of two ranks each: the gradients of all four are summed, and a share's norm counts once."""
    require_equal("hsdp", 4, "all")


@pytest.mark.parametrize("strategy", ("ddp", "fsdp2", "zero3"))
def test_no_arrangement_of_rows_over_two_ranks_hangs(strategy, shared):
    printed = run_ranks(2, "arrangements", "--strategy", strategy, *shared)
    assert printed.count("learnt from") == 9 + 4

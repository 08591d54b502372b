"""Checkpoints of a model that ranks share: killed, resumed elsewhere, damaged, and the memory that a rank needs for
them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.distributed.test_launch import ENVIRONMENT, rank_process
from tests.distributed.test_strategies import nursery
from tests.forked import run_ranks
from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tests.training.test_resume import write_recipe
from tiercel.config import SftRecipe
from tiercel.distributed.strategies.shard_files import saved_moments
from tiercel.models.weights.sharded_model import parts_of
from tiercel.runs.checkpoints import directory_of, problem_with
from tiercel.runs.files import file_sha256

pytestmark = pytest.mark.scale

STEPS = 6
SHARED = ("train.strategy=fsdp2",)
COPIES = (*SHARED, "train.shard_size=2")
SMALL = 100_000  # bytes of a file, in the runs that are watched


def make_recipe(directory: Path, name: str, **train) -> SftRecipe:
    checkpoint, rows = directory / "model", directory / "rows.jsonl"
    settings = {"steps": STEPS, "save_every": 1, "keep": STEPS, "threads": 1, **train}
    return sft_recipe(
        checkpoint,
        rows,
        directory / name,
        lora=None,
        freeze=["vision"],
        optim={"lr": 1e-3, "prompts_per_step": 4},
        data={"eval": None, "workers": 1},
        train=settings,
    )


@pytest.fixture(scope="module")
def place(tiny_checkpoints, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    shutil.copytree(tiny_checkpoints["qwen2_5_vl"], root / "model")
    write_rows(root)
    return root


@pytest.fixture(scope="module")
def alone(place) -> Path:
    """A run of one process, whose checkpoints are whole."""
    return run_offline(make_recipe(place, "alone"))


@pytest.fixture(scope="module")
def shared(place) -> Path:
    """A run of two ranks that nothing interrupts."""
    recipe = write_recipe(place / "shared.yaml", make_recipe(place, "shared"))
    run_ranks(nursery(), 2, "tiercel", ["sft", str(recipe), *SHARED], timeout=300)
    return place / "shared"


def start(place: Path, name: str, *arguments: str) -> subprocess.Popen:
    recipe = write_recipe(place / f"{name}.yaml", make_recipe(place, name))
    command = [sys.executable, "-m", "tiercel", "sft", str(recipe), *SHARED, "--nproc", "2", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def watched(place: Path, name: str, count: int, *changes: str) -> str:
    """What ranks with small files say."""
    recipe = write_recipe(place / f"{name}.yaml", make_recipe(place, name))
    words = [str(SMALL), "sft", str(recipe), *changes]
    return run_ranks(nursery(), count, "tests.distributed.shards_worker", words, timeout=300)


def branch(place: Path, run: Path, name: str, step: int) -> None:
    """Copy a run as it was after a step."""
    shutil.copytree(run, place / name)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(directory_of(place / name / "checkpoints", later), ignore_errors=True)


def contents(checkpoint: Path) -> dict[str, Tensor]:
    """All weights and moments, whole."""
    moments = saved_moments(checkpoint)
    files = sorted((checkpoint / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()} | dict(moments)


def assert_same(checkpoint: Path, other: Path) -> None:
    mine, theirs = contents(checkpoint), contents(other)
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-5, msg=name)


def last_of(run: Path) -> Path:
    return directory_of(run / "checkpoints", STEPS)


def test_each_rank_writes_its_part_and_the_run_is_that_of_one_process(alone, shared):
    files = sorted(file.name for file in (last_of(shared) / "optimizer").iterdir())
    assert files == ["rank-00000-00000.safetensors", "rank-00001-00000.safetensors"]
    sizes = [(last_of(shared) / "optimizer" / name).stat().st_size for name in files]
    assert max(sizes) < 1.05 * min(sizes)
    assert not (last_of(shared) / "optimizer.safetensors").exists()
    assert_same(last_of(shared), last_of(alone))


def test_after_sigkill_all_bytes_are_those_of_the_run_that_nothing_disturbed(place, shared):
    process = start(place, "killed", "--max-restarts", "1")
    checkpoints = place / "killed/checkpoints"
    deadline = time.monotonic() + 120
    while not directory_of(checkpoints, 1).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "going on from step" in said
    hashes = [
        {file.relative_to(last): file_sha256(file) for file in last.rglob("*.safetensors")}
        for last in (last_of(shared), last_of(place / "killed"))
    ]
    assert hashes[0] == hashes[1]


@pytest.fixture(scope="module")
def copies(place, shared) -> tuple[Path, str]:
    """Two ranks' checkpoint in two copies of two ranks each, with small files; and what the ranks said."""
    branch(place, shared, "copies", 2)
    return place / "copies", watched(place, "copies", 4, *COPIES)


def numbers(said: str, word: str) -> list[int]:
    return [int(number) for number in re.findall(rf"rank \d+: {word} (\d+)", said)]


def require_shares(said: str, checkpoint: Path, ranks: int, shares: int) -> None:
    """All ranks together have restored the bytes of the checkpoint, and each has read its rows, and those parameters
    whole that are not sharded: of the projector."""
    sizes = {name: tensor.nbytes for name, tensor in saved_moments(checkpoint).items()}
    whole = sum(size for name, size in sizes.items() if "visual" in name)
    assert 0 < whole < sum(sizes.values()) / 3
    assert numbers(said, "restored") == [sum(sizes.values())] and ", equal" in said
    expected = whole + (sum(sizes.values()) - whole) / shares
    assert numbers(said, "read") == [pytest.approx(expected, rel=0.01)] * ranks


def test_other_numbers_of_ranks_go_on_from_equal_moments_of_which_each_reads_its_rows(copies, alone):
    run, said = copies
    assert "going on from step 2" in said
    require_shares(said, directory_of(run / "checkpoints", 2), ranks=4, shares=2)
    names = {file.name[:10] for file in (last_of(run) / "optimizer").iterdir()}
    assert names == {"rank-00000", "rank-00001"}  # the second copy writes nothing
    assert_same(last_of(run), last_of(alone))


def test_twice_as_many_ranks_go_on_from_half_as_many_shards(place, shared, alone):
    branch(place, shared, "quarters", 4)
    said = watched(place, "quarters", 4, *SHARED)
    require_shares(said, directory_of(shared / "checkpoints", 4), ranks=4, shares=4)
    assert len(list((last_of(place / "quarters") / "optimizer").glob("rank-*-00000.safetensors"))) == 4
    assert_same(last_of(place / "quarters"), last_of(alone))


def test_no_rank_holds_more_than_a_part_of_the_model_while_it_saves(copies):
    run, said = copies
    tensors = {n: t for file in (last_of(run) / "model").glob("*.safetensors") for n, t in load_file(file).items()}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    largest_part = max(sum(sizes[name] for name in part) for part in parts_of(sizes, SMALL))
    print(f"held at most {max(numbers(said, 'held')):,} bytes of {sum(sizes.values()):,}")
    assert max(numbers(said, "held")) <= largest_part < sum(sizes.values()) / 4


def test_transformers_reads_the_files(copies):
    model = last_of(copies[0]) / "model"
    assert len(list(model.glob("model-*-of-*.safetensors"))) > 2
    read = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, output_loading_info=True, dtype=torch.float32)
    assert not any(read[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_one_process_goes_on_from_shards(place, copies, alone):
    branch(place, copies[0], "gathered", 3)
    assert_same(last_of(run_offline(make_recipe(place, "gathered", strategy="single"))), last_of(alone))


def test_two_ranks_go_on_from_whole_files(place, alone):
    branch(place, alone, "divided", 3)
    said = watched(place, "divided", 2, *SHARED)
    require_shares(said, directory_of(alone / "checkpoints", 3), ranks=2, shares=2)
    assert_same(last_of(place / "divided"), last_of(alone))


@pytest.mark.parametrize("harm", ("damaged", "missing"))
def test_a_shard_that_is_not_what_was_written_is_named(shared, tmp_path, harm):
    checkpoint = tmp_path / last_of(shared).name
    shutil.copytree(last_of(shared), checkpoint)
    assert problem_with(checkpoint) is None
    shard = checkpoint / "optimizer/rank-00001-00000.safetensors"
    if harm == "missing":
        shard.unlink()
        assert problem_with(checkpoint) == "optimizer/rank-00001-00000.safetensors is missing"
        return
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    found = problem_with(checkpoint)
    assert found == "optimizer/rank-00001-00000.safetensors does not have the sha256 of the manifest"

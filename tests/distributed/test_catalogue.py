"""Parts of the catalogue that look at the whole step take the same steps on any number of ranks."""

from pathlib import Path

import pytest

from tests.distributed.test_launch import make_recipe, run, samples
from tests.training.test_loops import write_rows
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.scale

STEPS = 4
# Every second row's group is flat, so that a step looks for further rows, whichever rank they are on.
HALF_FLAT = "def variety(sample):\n    return 1.0 if int(sample.id[4:]) % 2 else len(set(sample.completion)) / 10\n"
COMPARED = (
    "loss",
    "grad_norm",
    "reward/mean",
    "reward/std",
    "kl/mean",
    "entropy/mean",
    "policy/learnt_fraction",
    "group/resample_tries",
    "group/chosen",
    "group/zero_std_fraction",
)


@pytest.fixture(scope="module")
def recipe(tiny_checkpoints, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("catalogue")
    write_rows(directory)
    (directory / "mine.py").write_text(HALF_FLAT)
    return make_recipe(
        tiny_checkpoints,
        directory,
        "run",
        rewards=[{"call": f"{directory}/mine.py:variety"}],
        rollout={"resample_tries": 2},
        optim={"minibatches": 2},
        algorithm={
            "advantage": "reinforce_pp",
            "entropy_coef": 0.01,
            "top_entropy": 0.5,
            "kl": {"coef": 0.1, "place": "reward", "sync_every": 2, "sync_mix": 0.5},
        },
        train={"steps": STEPS, "threads": 1},
    )


def ended(recipe: Path, name: str, *arguments: str) -> Path:
    output = recipe.parent / name
    run(recipe, *arguments, f"output={output}")
    return output


@pytest.fixture(scope="module")
def alone(recipe) -> Path:
    return ended(recipe, "alone")


@pytest.mark.parametrize("strategy", ("ddp", "fsdp2"))
def test_two_ranks_take_the_steps_of_one(recipe, alone, strategy):
    both = ended(recipe, strategy, "--nproc", "2", f"train.strategy={strategy}")
    assert samples(both) == samples(alone)
    mine, theirs = read_metrics(both), read_metrics(alone)
    assert [row["step"] for row in mine] == list(range(1, STEPS + 1))
    for row, other in zip(mine, theirs, strict=True):
        found = {name: row[name] for name in COMPARED}
        assert found == pytest.approx({name: other[name] for name in COMPARED}, rel=1e-4, abs=1e-7), row["step"]


def test_the_recipe_takes_those_paths(alone):
    rows = read_metrics(alone)
    assert {row["group/resample_tries"] for row in rows} == {1, 2}
    assert all(row["group/chosen"] == 4 and row["group/zero_std_fraction"] == 0.5 for row in rows)
    assert rows[0]["kl/mean"] == 0 and all(row["kl/mean"] > 0 for row in rows[1:])
    assert all(0.4 < row["policy/learnt_fraction"] < 0.6 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)

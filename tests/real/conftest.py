"""The model of `tiercel demo --real` and rows of training pictures, if the packages are installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tiercel.demo.real import make_model
from tiercel.demo.real_parts import PACKAGES, QuestionSample, write_sample


def pytest_collection_modifyitems(items):
    missing = [name for name in PACKAGES if find_spec(name) is None]
    for item in items if missing else ():
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} are installed by make test-real"))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("real") / "start"
    make_model(directory)
    return directory


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """Eight questions of each of four kinds."""
    sample = QuestionSample(name="rows", split="train", per_kind=8, seed=5, pictures=range(4_000), is_balanced=True)
    return write_sample(tmp_path_factory.mktemp("rows"), sample)


@pytest.fixture(scope="session")
def many_rows(tmp_path_factory) -> Path:
    """64 questions of each kind, so that a difference of losses is more than the noise of a few rows."""
    sample = QuestionSample(name="rows", split="train", per_kind=64, seed=6, pictures=range(4_000), is_balanced=True)
    return write_sample(tmp_path_factory.mktemp("many"), sample)


@pytest.fixture(scope="session")
def trained(model, rows, tmp_path_factory) -> Path:
    """A run of three steps of GRPO, from which weights move."""
    from tests.training.test_loops import run_grpo
    from tiercel.config.schema import GrpoRecipe

    tree = {
        "model": {"path": str(model), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "eval": str(rows), "workers": 0, "max_prompt_tokens": 64},
        "rewards": [{"name": "exact"}],
        "rollout": {"group_size": 4, "max_new_tokens": 4},
        "optim": {"lr": 1e-3, "prompts_per_step": 4},
        "train": {"steps": 3, "threads": 1},
        "output": str(tmp_path_factory.mktemp("run") / "run"),
    }
    return run_grpo(GrpoRecipe.model_validate(tree))

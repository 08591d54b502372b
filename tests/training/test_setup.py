"""What both loops share: a checkpoint that cannot be written."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from tests.tiny_models import TINY_LORA, tiny_recipe
from tiercel.distributed.ranks import ALONE
from tiercel.errors import RunError
from tiercel.runs.directory import RunDirectory
from tiercel.training import setup


@pytest.fixture
def engine() -> SimpleNamespace:
    """As much of one as a save needs: 12 bytes of weights, 28 of moments."""
    strategy = SimpleNamespace(
        trained_weights=lambda: {"a": torch.zeros(3)},
        optimizer_tensors=lambda: {"a.exp_avg": torch.zeros(3), "a.step": torch.zeros(2, dtype=torch.float64)},
        scaler_state=dict,
    )
    return SimpleNamespace(ranks=ALONE, strategy=strategy, policy=None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_names_the_directory_and_the_step(engine, tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(setup, "save_trained", fail)
    with pytest.raises(RunError, match=rf"{tmp_path}/checkpoints: the checkpoint of step 3 .*No space left"):
        setup.save(RunDirectory(path=tmp_path), tiny_recipe(tmp_path, lora=TINY_LORA), engine, 3)


def test_a_save_knows_beforehand_how_much_it_needs(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=39))
    with pytest.raises(RunError, match="needs 40 bytes, and the disk has 39 free"):
        setup.save(RunDirectory(path=tmp_path), tiny_recipe(tmp_path, lora=TINY_LORA), engine, 3)

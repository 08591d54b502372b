"""Weights are read into the file cache while Python imports: once per machine, and only if that helps."""

import pytest

from tiercel.cli import preload
from tiercel.config.schema import Data, Model, SftRecipe, Train


def recipe_of(path) -> SftRecipe:
    return SftRecipe(model=Model(path=str(path)), data=Data(train="-"), train=Train(steps=1), output="-")


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"12345678" * 100)
    return tmp_path


def test_every_file_of_a_local_checkpoint_is_read(checkpoint, monkeypatch):
    monkeypatch.setattr(preload, "CHUNK_BYTES", 64)
    (checkpoint / "b.safetensors").mkdir()  # it cannot be read; whoever loads it reports that
    thread = preload.read_weights_ahead(recipe_of(checkpoint))
    assert thread is not None and thread.daemon
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("why", ("a hub's", "another rank's", "too large"))
def test_nothing_is_read_where_it_would_not_help(checkpoint, monkeypatch, why):
    if why == "another rank's":
        monkeypatch.setenv("LOCAL_RANK", "1")
    if why == "too large":
        monkeypatch.setattr(preload, "MOST_SHARE", 1e-12)
    path = "Qwen/Qwen2.5-VL-3B-Instruct" if why == "a hub's" else checkpoint
    assert preload.read_weights_ahead(recipe_of(path)) is None

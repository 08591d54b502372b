"""What an engine with its own weights is sent."""

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import TINY_LORA, tiny_recipe
from tiercel.runs.directory import RunDirectory
from tiercel.training.grpo.policy_sync import PolicySync
from tiercel.training.trainer import build_trainer


class ReadingEngine:
    """An engine that reads the weights of a version, and loads them nowhere."""

    shares_weights = False

    def __init__(self, file="adapter_model.safetensors"):
        self.file = file

    def load_policy(self, version, adapter_directory):
        self.version = version
        self.directory = adapter_directory
        self.tensors = load_file(adapter_directory / self.file)

    def close(self):
        pass


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_an_engine_is_sent_the_adapter_in_the_dtype_that_the_policy_computes_in(tiny_checkpoints, tmp_path, dtype):
    trainer = build_trainer(tiny_recipe(tiny_checkpoints["qwen2_5_vl"], dtype=dtype, lora=TINY_LORA))
    engine = ReadingEngine()
    sync = PolicySync(engine, trainer, RunDirectory(path=tmp_path))
    trained = trainer.policy.trained_parameters()
    for version in (1, 2):
        for parameter in trained.values():
            parameter.data.add_(0.123456789)
        sync.update_weights(version)
        assert engine.version == version
        assert {tensor.dtype for tensor in engine.tensors.values()} == {getattr(torch, dtype)}
        sums = [
            sum(float(tensor.double().sum()) for tensor in tensors)
            for tensors in (
                engine.tensors.values(),
                (each.detach().to(getattr(torch, dtype)) for each in trained.values()),
            )
        ]
        assert sums[0] == pytest.approx(sums[1])
        assert list((tmp_path / "policies").iterdir()) == [engine.directory]
    sync.close()
    assert list((tmp_path / "policies").iterdir()) == []


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_server_is_sent_a_whole_model_in_full_fine_tuning(tiny_checkpoints, tmp_path, dtype):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    trainer = build_trainer(tiny_recipe(checkpoint, dtype=dtype, lora=None))
    engine = ReadingEngine("model.safetensors")
    sync = PolicySync(engine, trainer, RunDirectory(path=tmp_path))
    published = load_file(checkpoint / "model.safetensors")
    sync.update_weights(0)
    assert engine.tensors.keys() == published.keys()
    assert all(torch.equal(each, published[name].to(each.dtype)) for name, each in engine.tensors.items())
    for parameter in trainer.policy.trained_parameters().values():
        parameter.data.add_(1.0)
    sync.update_weights(1)
    moved = [name for name, each in engine.tensors.items() if not torch.equal(each, published[name].to(each.dtype))]
    assert moved and not any("visual" in name for name in moved)
    assert {tensor.dtype for tensor in engine.tensors.values()} == {getattr(torch, dtype)}
    assert (engine.directory / "preprocessor_config.json").is_file() and engine.version == 1
    assert list((tmp_path / "policies").iterdir()) == [engine.directory]
    sync.close()
    assert list((tmp_path / "policies").iterdir()) == []

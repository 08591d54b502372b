"""What an engine with weights of its own is sent."""

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import TINY_LORA, tiny_recipe
from tiercel.runs.directory import RunDirectory
from tiercel.training.build import build_trainer
from tiercel.training.sampling import PolicySync


class ReadingEngine:
    """An engine that reads the adapter of a version, and loads it nowhere."""

    shares_weights = False

    def load_policy(self, version, adapter_directory):
        self.version = version
        self.directory = adapter_directory
        self.tensors = load_file(adapter_directory / "adapter_model.safetensors")

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
        sync.load(version)
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

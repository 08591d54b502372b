"""Where models run on a machine without a GPU."""

import ctypes

import torch

from tiercel.devices import driver_version, training_device


def test_without_a_gpu_models_run_on_the_cpu():
    assert training_device() == torch.device("cpu")


def test_a_machine_without_a_driver_has_version_0(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert driver_version() == 0

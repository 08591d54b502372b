"""Which form runs on which device."""

import pytest
import torch

from tiercel.errors import ModelError
from tiercel.packing.pass_options import chosen_form

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_goes_by_the_device_and_falls_back_for_the_model():
    assert chosen_form("auto", CPU, None) == "split"
    assert chosen_form("auto", GPU, None) == "flex"
    assert chosen_form("auto", torch.device("xpu"), None) == "dense"
    assert chosen_form("auto", CPU, "its layers have chunked attention") == "repeated"


def test_a_form_asked_for_is_taken_or_refused():
    for form in ("split", "dense", "repeated"):
        assert chosen_form(form, CPU, None) == form
    assert chosen_form("repeated", CPU, "its layers have chunked attention") == "repeated"
    with pytest.raises(ModelError, match=r"dense runs a prompt once.*chunked attention; use repeated"):
        chosen_form("dense", CPU, "its layers have chunked attention")
    with pytest.raises(ModelError, match="no backward pass on a CPU; use split"):
        chosen_form("flex", CPU, None)
    with pytest.raises(ModelError, match="a CPU, but the device is cuda; use flex"):
        chosen_form("split", GPU, None)

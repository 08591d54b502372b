"""Whether a card can run the learner's attention for a model, by the table of kernels (`make gpu-compile`)."""

from typing import Any

from tiercel.models.layers.attention import heads_of
from tiercel.packing.kernel_table import fit_of, known_fits
from tiercel.planning.devices import Device


def flex_problem(config: Any, dtype: str, device: Device | None) -> str | None:
    """Return why FlexAttention does not fit the card for a decoder with this config, or None if it fits or if the table
    does not have the card. A run then takes `learner.form: dense`."""
    if device is None:
        return None
    for size in sorted({heads.size for heads in heads_of(config)}):
        fit = fit_of(known_fits(), device.capability, size, dtype)
        if fit is not None and fit.problem:
            return f"FlexAttention does not fit a {device.name} for heads of {size} in {dtype}: {fit.problem}"
    return None

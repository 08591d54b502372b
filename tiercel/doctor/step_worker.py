"""The child that tries a device. It prints the name of each step before and after it, so that its parent knows the step
in which it died. The first step imports torch."""

import json
import signal
import time
from typing import Any

IMPORT, GPUS = "import", "gpus"
MARK = "tiercel-step "  # begins the lines for the parent; libraries print lines as well
WRONG, HANG = "wrong", "hang"  # the name of a signal is a fault as well
FOR_EVER = 86400.0  # seconds


def main(arguments: list[str]) -> None:
    """Perform the steps. Arguments: the device; a JSON object of faults by step, for tests; the steps."""
    device, faults_text, *steps = arguments
    faults = json.loads(faults_text)
    for step in (IMPORT, *steps):
        _say({"begins": step})
        fault = faults.get(step)
        if fault == HANG:
            time.sleep(FOR_EVER)
        elif fault is not None and fault != WRONG:
            signal.raise_signal(signal.Signals[fault])
        _say({"ends": step, "result": _perform(step, device, is_wrong=fault == WRONG)})


def _perform(step: str, device: str, *, is_wrong: bool) -> Any:
    from tiercel.doctor import computations

    if step == IMPORT:
        return computations.torch.__version__
    if step == GPUS:
        return computations.gpu_facts()
    return computations.relative_errors(device, step, computations.wrong_product if is_wrong else None)


def _say(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)

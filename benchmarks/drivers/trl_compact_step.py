"""GRPO steps of TRL with its head as on a GPU. The arguments are those of trl_step.

If Triton is installed, TRL 1.16 puts only completion tokens through the head, and otherwise every token of the prompt
as well. No GPU run of TRL does that extra work, so this driver makes TRL leave it out on a CPU too.
"""

import torch
from trl.trainer import utils

from benchmarks.drivers.trl_step import main


def scores_completions_only(device: torch.device) -> bool:
    return True


if __name__ == "__main__":
    assert hasattr(utils, "_use_triton"), "this release of TRL decides elsewhere which positions it scores"
    utils._use_triton = scores_completions_only
    main()

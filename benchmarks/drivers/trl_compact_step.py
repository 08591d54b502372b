"""GRPO steps of TRL with its head as on a GPU. Arguments as for trl_step.

TRL 1.16 puts completion tokens alone through the head where it has Triton, and every token of the prompt as well
where it has not. On CPU that is work which no GPU run of TRL does, so this takes the former way there, too.
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

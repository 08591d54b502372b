"""Make torchvision's Python part importable next to a CPU build of torch, in one virtual environment.

    ENVIRONMENT/bin/python benchmarks/environments/declare_torchvision_operators.py

torchvision's wheel is built against CUDA. Without its compiled part, its Python part fails at import because two
operators are unknown. Processors and the peers import it but call neither. This writes a module into the environment
that declares both when torchvision is first imported, and a .pth file that loads the module at start.
"""

import sysconfig
from pathlib import Path

MODULE = "declared_torchvision_operators"
SOURCE = '''"""Written by tiercel's benchmarks: declares two operators before torchvision asks for them."""

import sys


class DeclareFirst:
    """An import finder that finds nothing, and declares the operators when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for operator in ("nms", "qnms"):
                    torch.library.define(
                        f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        return None


sys.meta_path.insert(0, DeclareFirst())
'''


def main() -> None:
    packages = Path(sysconfig.get_paths()["purelib"])
    (packages / f"{MODULE}.py").write_text(SOURCE, encoding="utf-8")
    (packages / f"{MODULE}.pth").write_text(f"import {MODULE}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

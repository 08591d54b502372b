"""Run a Python program on a null GPU: a CUDA build of torch without a card. Kernels compute nothing, but memory,
captures, compilers and the choice of kernels are real. docs/gpu.md says what that can prove."""

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parent / "library"
ROOT = Path(__file__).parents[2]
CARDS = ("h100", "a100", "b200", "4090", "3090", "5090")


@cache
def built_library() -> Path:
    """Compile the null GPU with gcc and the headers in Triton's wheel, once for each state of its source."""
    content = b"".join(file.read_bytes() for file in sorted(LIBRARY.iterdir()))
    directory = Path(sys.prefix) / f"nullgpu-{hashlib.sha256(content).hexdigest()[:16]}"
    if not (directory / "libnullgpu.so").exists():
        subprocess.run(["sh", str(LIBRARY / "build.sh"), sys.executable, str(directory)], check=True)
    return directory


def on_card(card: str, module: str, *words: str, cards: int = 1, seconds: float = 900, **settings: str) -> list[Any]:
    """Run `python -m tests.nullgpu.MODULE WORDS` on null cards of one kind. Returns the JSON values that it
    prints, one a line. Fails the test with its last lines if it ends with another code than 0."""
    command = [sys.executable, "-m", f"tests.nullgpu.{module}", *words]
    environment = environment_of(card, cards) | settings
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} on {card}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def environment_of(card: str, cards: int = 1) -> dict[str, str]:
    """Return the environment of a program on null cards."""
    directory = built_library()
    return os.environ | {
        "NULLGPU_CARD": card,
        "NULLGPU_COUNT": str(cards),
        "NULLGPU_SO": str(directory / "libnullgpu.so"),
        "LD_PRELOAD": str(directory / "libnullgpu.so"),
        "LD_LIBRARY_PATH": str(directory),
        "TRITON_LIBCUDA_PATH": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(sys.prefix) / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TIERCEL_LANG": "en",
        "HF_HUB_OFFLINE": "1",
    }

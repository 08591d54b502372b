"""A run of two ranks on two null cards: `python -m tests.nullgpu.ranks CASE`. Collectives of NCCL move nothing there;
those of gloo are real."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.nullgpu.computed import stand_in
from tests.nullgpu.whole_runs import FAMILY, GRPO
from tests.tiny_models import save_tiny_checkpoint
from tests.training.test_loops import grpo_recipe, merged, write_rows
from tiercel.cli.main import main

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"train": {"strategy": "ddp"}},
    "ddp, full": {"train": {"strategy": "ddp"}, "lora": None},
    "ddp, compiled": {"train": {"strategy": "ddp"}, "learner": {"compile": True}},
    "fsdp2": {"train": {"strategy": "fsdp2"}},
    "fsdp2, checkpointing": {"train": {"strategy": "fsdp2"}, "learner": {"gradient_checkpointing": "full"}},
    "context": {"train": {"strategy": "ddp", "context_parallel": 2}},
    "context, fsdp2": {"train": {"strategy": "fsdp2", "context_parallel": 2}},
}
SECONDS = 600


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_ranks(name: str, directory: Path) -> dict[str, Any]:
    """Run a case as a launcher would, and return the exit codes of both ranks with the ends of what they said."""
    checkpoint, rows = save_tiny_checkpoint(FAMILY, directory / "model"), write_rows(directory)
    recipe = grpo_recipe(checkpoint, rows, directory / "run", **merged(GRPO, CASES[name]))
    file = directory / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.nullgpu.ranks", "--recipe", str(file)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=SECONDS)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    return {"case": name, "codes": [each.returncode for each in ranks], "said": [text[-3000:] for text in said]}


if __name__ == "__main__":
    if sys.argv[1] == "--recipe":
        stand_in()
        sys.exit(main(["grpo", sys.argv[2]]))
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(run_ranks(case, Path(scratch))), flush=True)

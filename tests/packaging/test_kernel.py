"""A run of a notebook's kernel that is interrupted, as by the button or Ctrl-C, and what becomes of it."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.training.test_offline import bytes_of, without_times

pytestmark = pytest.mark.notebook

LIMIT_SECONDS = 240
STEPS = 6
# The reward is defined in the cell and uses a helper and a constant of the session. It is slow, to leave time for the
# interrupt.
TRAIN = f"""
import time
from PIL import Image
import tiercel as tc
from tiercel.demo.pointing import START

PAUSE = 0.2

def count(text):
    return text.count(",")

def slow(completion, answer):
    time.sleep(PAUSE)
    return float(count(completion) == 3) + float(str(answer) in completion)

turn = {{"role": "user", "content": "<image>Where is the two?"}}
rows = [
    {{"messages": [turn], "images": [Image.new("RGB", (112, 112), (9 * n, 60, 60))], "answer": 28 + 4 * n}}
    for n in range(8)
]
run = tc.grpo(
    model={{"path": START, "dtype": "float32"}},
    data=rows,
    rewards=[slow],
    lora={{"rank": 4, "alpha": 8}},
    rollout={{"group_size": 4, "max_new_tokens": 12}},
    optim={{"prompts_per_step": 2, "lr": 1e-2}},
    train={{"steps": {STEPS}, "save_every": 1, "threads": 1}},
    output="runs/cell",
)
"""
GO_ON = "run.resume(steps=run.steps + 1)"


class Kernel:
    """A kernel and the replies to its cells."""

    def __init__(self, folder: Path):
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(startup_timeout=LIMIT_SECONDS, cwd=str(folder))

    def send(self, code: str, **values: str) -> str:
        return self.client.execute(code, user_expressions=values)

    def reply(self, sent: str) -> dict:
        """Return the reply to a cell: its status, and the texts of the values that were asked for."""
        while (message := self.client.get_shell_msg(timeout=LIMIT_SECONDS))["parent_header"].get("msg_id") != sent:
            pass
        content = message["content"]
        values = content.get("user_expressions", {}).items()
        return {"status": content["status"], **{name: each["data"]["text/plain"] for name, each in values}}

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def rows_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else 0


def test_an_interrupted_cell_keeps_its_run_which_the_kernel_and_the_command_end(kernel, command, tmp_path):
    run = tmp_path / "runs/cell"
    cell = kernel.send(TRAIN, steps="run.steps")
    deadline = time.monotonic() + LIMIT_SECONDS
    while rows_of(run / "metrics.jsonl") < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kernel.manager.interrupt_kernel()
    interrupted = kernel.reply(cell)
    done = int(interrupted["steps"])
    assert interrupted["status"] == "ok" and 1 <= done < STEPS - 1
    assert kernel.reply(kernel.send(GO_ON, steps="run.steps")) == {"status": "ok", "steps": str(done + 1)}

    def grpo(*words: str) -> None:
        subprocess.run(
            [command, "grpo", str(run / "config.yaml"), f"train.steps={STEPS}", *words],
            cwd=tmp_path,
            timeout=LIMIT_SECONDS,
            check=True,
        )

    grpo(f"output={tmp_path / 'whole'}")
    grpo()
    assert bytes_of(run) == bytes_of(tmp_path / "whole")
    assert without_times(run) == without_times(tmp_path / "whole")
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5, 6]

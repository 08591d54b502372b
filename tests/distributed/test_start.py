"""Real ranks that are stopped, killed or have different recipes before the first step, and what each launcher then
reports."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults.processes import MARK, environment, marked_processes, run
from benchmarks.faults.start_hangs import HANGING
from tests.distributed.test_launch import make_recipe
from tiercel.errors import EXIT_STALL, EXIT_TRAINING

pytestmark = pytest.mark.scale

TIMEOUT = 5.0
RELIABILITY = {"stall_timeout": TIMEOUT, "reward_timeout": TIMEOUT}
SECONDS = 120.0
SECONDS_AFTER = 10.0


def hanging(at: str, kind: str, rank: str) -> dict[str, str]:
    path = os.pathsep.join([str(HANGING), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "HANG_AT": at, "HANG_KIND": kind, "HANG_RANK": rank}


@pytest.mark.parametrize(
    ("kind", "at", "words"),
    (
        ("SIGFPE", "torch", ("tiercel doctor", "model.dtype: float32", "rank 1 was at", "no further attempt is made")),
        ("SIGILL", "transformers", ("built for a different processor", "tiercel doctor", "no further attempt is made")),
        ("SIGSEGV", "torch", ("tiercel doctor", "to resume from the newest checkpoint")),
        ("SIGBUS", "torch", ("/dev/shm", "to resume from the newest checkpoint")),
        ("SIGKILL", "torch", ("oom_kill", "to resume from the newest checkpoint")),
    ),
)
def test_a_rank_that_a_signal_ends_is_named_with_its_cause(tiny_checkpoints, tmp_path, kind, at, words):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    ended = run("grpo", recipe, "--nproc", "2", variables=hanging(at, kind, "1"))
    assert ended.problem(EXIT_TRAINING, f"rank 1 was killed by {kind}", *words) is None, ended.said
    assert "rank 0 was killed" not in ended.said


def test_a_signal_that_would_come_again_is_not_tried_again(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    ended = run("grpo", recipe, "--nproc", "2", "--max-restarts", "3", variables=hanging("torch", "SIGFPE", "1"))
    assert ended.problem(EXIT_TRAINING, "rank 1 was killed by SIGFPE", "no further attempt is made") is None, ended.said
    assert ended.said.count("fault plan: SIGFPE") == 1


@pytest.mark.parametrize("ranks", ("1", "2"))
def test_where_no_rank_can_speak_the_launcher_does(tiny_checkpoints, tmp_path, ranks):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run", reliability=RELIABILITY)
    both = hanging("torch", "SIGSTOP", "any")
    ended = run("grpo", recipe, "--nproc", ranks, "--max-restarts", "0" if ranks == "2" else "1", variables=both)
    words = [f"rank {rank} (" for rank in range(int(ranks))]
    assert ended.problem(EXIT_STALL, "a signal has stopped it", "phase import of the start", *words) is None, ended.said
    attempts = ended.said.count("fault plan:") // int(ranks)
    assert ended.said.count("stalled:") == attempts


def agents(recipe: Path, variables: dict[str, str], *of_each: list[str]) -> list[str]:
    """What torchrun's agents say, one for each node with a rank, on this machine; each has arguments of its own. Once
    one has ended the others have a while to end as well, and are then killed with their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(of_each)}", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", "--rdzv-id=start"),
        *("-m", "tiercel", "grpo", str(recipe)),
    ]
    marked = {**environment(), "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
    files = [recipe.with_name(f"agent-{number}.txt") for number in range(len(of_each))]
    processes = []
    for file, arguments in zip(files, of_each, strict=True):
        with file.open("w") as output:
            processes.append(subprocess.Popen([*launcher, *arguments], env=marked, stderr=output))
    deadline = time.monotonic() + SECONDS
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + SECONDS_AFTER
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in marked_processes(marked[MARK]):
        os.kill(process, signal.SIGKILL)
    codes = [process.wait() for process in processes]
    assert 0 not in codes
    return [file.read_text() for file in files]


def test_two_nodes_with_different_recipes_name_the_keys_and_values_on_both(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    other = ["optim.lr=2e-3", "data.system=say canary-of-a-secret"]
    for said in agents(recipe, {"SOME_TOKEN": "canary-of-a-secret"}, ["optim.lr=1e-3"], other):
        message, _, trace = said.partition("Traceback")
        for part in ("0.001 on rank", "0.002 on rank", "(node 0, ", "(node 1, ", "data.system: "):
            assert part in message
            assert part in trace[-1500:]  # torchrun's own output ends with it
        assert "[redacted SOME_TOKEN]" in said and "canary" not in said
    assert not (tmp_path / "run").exists()


def test_under_torchrun_a_rank_that_is_stopped_on_another_node_is_named(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run", reliability=RELIABILITY)
    said = agents(recipe, hanging("torch", "SIGSTOP", "1"), [], [])
    (speaker,) = (each for each in said if "stalled:" in each)
    for part in ("rank 1 (", "a signal has stopped it", "phase import of the start", "rank 0 w"):
        assert part in speaker

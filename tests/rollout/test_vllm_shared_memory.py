import mmap
import subprocess
import sys

import pytest

from tiercel.distributed.ranks import Ranks
from tiercel.rollout.vllm import shared_memory as vllm_shared_memory
from tiercel.rollout.vllm.shared_memory import meeting_by_name

HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


@pytest.fixture
def hold():
    """Another process that maps a file."""
    processes = []

    def start(path):
        path.write_bytes(b"x" * 4096)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"

    yield start
    for process in processes:
        process.communicate()


def test_names_of_ended_runs_go_and_those_of_living_ones_stay(shared_memory, hold):
    left = shared_memory / "-tp:0-[0-1]-cpushm_0"
    left.write_bytes(b"x" * 4096)
    other = shared_memory / "psm_1234"
    other.write_bytes(b"x")
    living = shared_memory / "43211-tp:0-[0-1]-cpushm_0"
    hold(living)
    with meeting_by_name(Ranks(), tensor_parallel=2):
        assert not left.exists() and living.exists() and other.exists()
    assert living.exists()


def test_only_the_first_rank_of_a_machine_removes_names_under_any_launcher(shared_memory, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    left = shared_memory / "-tp:0-[0-1]-cpushm_0"
    left.write_bytes(b"x")
    with meeting_by_name(Ranks(local_rank=1), tensor_parallel=2):
        assert left.exists()


def test_the_names_that_this_process_holds_go_once_the_ranks_have_met(shared_memory):
    name = shared_memory / "-tp:0-[0-1]-cpushm_1"
    with meeting_by_name(Ranks(), tensor_parallel=2):
        name.write_bytes(b"x" * 4096)
        with name.open("r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
    assert not name.exists()
    assert held[:1] == b"x"


def test_an_engine_of_one_rank_needs_no_names(shared_memory):
    with meeting_by_name(Ranks(), tensor_parallel=1):
        assert not list(shared_memory.iterdir())

"""The loader gives the same steps for any number of workers, and its workers end when they should."""

import multiprocessing
import os
import resource
import signal
import time

import pytest
import torch

from tests.forked import commands
from tiercel.data.loader import StepLoader, StepOrder
from tiercel.data.media.images import ImageProblem
from tiercel.data.order import RowOrder
from tiercel.errors import DataError, EnvironmentProblem, TrainingError
from tiercel.types import EncodedPrompt, Message, RejectedRow, Row

ROWS = tuple(
    Row(id=f"r{n}", messages=(Message(role="user", content=f"{n}?"),), columns={}, file="r.jsonl", line=n + 1)
    for n in range(11)
)


def encode(row, index):
    """A toy family: r3 is refused by its image, r5 by its text, r7 by an answer."""
    if row.id == "r3":
        raise ImageProblem("a.png", "no such file")
    if row.id == "r5":
        raise DataError("too long", field="messages")
    if row.id == "r7":
        return RejectedRow(id=row.id, file=row.file, line=row.line, field="boxes", reason="odd")
    token_ids = torch.arange(row.line + 2)
    return EncodedPrompt(
        row=row, index=index, text=row.id, token_ids_P=token_ids, positions_DP=token_ids.expand(3, -1), images=()
    )


def steps_of(**changes):
    order = {"counts": (len(ROWS),), "weights": (1.0,), "seed": 1, "shuffle": True}
    order |= {key: changes.pop(key) for key in order if key in changes}
    return StepOrder(**{"rows": RowOrder(**order), "prompts_per_step": 4, **changes})


ORDER = steps_of()


def loaded(workers, start=0, stop=7, encode=encode, order=ORDER):
    with StepLoader(ROWS, encode, order, start=start, stop=stop, workers=workers) as loader:
        return list(loader)


def summary(batches):
    return [
        (
            batch.step,
            [(prompt.row.id, prompt.index, prompt.token_ids_P.tolist()) for prompt in batch.prompts],
            batch.rejected,
        )
        for batch in batches
    ]


def test_the_same_steps_for_any_number_of_workers():
    inline = summary(loaded(0))
    assert [step for step, _, _ in inline] == list(range(7))
    assert summary(loaded(1)) == inline
    assert summary(loaded(3)) == inline
    assert summary(loaded(6)) == inline  # more workers than rows in a step


def test_every_row_comes_once_an_epoch_in_the_global_order():
    batches = loaded(2, stop=3, order=steps_of(end=11))
    assert [len(batch.prompts) + len(batch.rejected) for batch in batches] == [4, 4, 3]
    ids = [prompt.row.id for batch in batches for prompt in batch.prompts]
    ids += [row.id for batch in batches for row in batch.rejected]
    assert sorted(ids) == sorted(row.id for row in ROWS)
    for batch in batches:
        indices = [prompt.index for prompt in batch.prompts]
        assert indices == sorted(indices)


def test_resuming_gives_the_same_steps():
    assert summary(loaded(2, start=3)) == summary(loaded(0))[3:]


def test_ranks_share_each_step_in_order():
    whole = loaded(0)
    shares = [loaded(2, order=steps_of(rank=rank, world_size=3)) for rank in range(3)]
    for step, batch in enumerate(whole):
        ids = [prompt.row.id for share in shares for prompt in share[step].prompts]
        assert ids == [prompt.row.id for prompt in batch.prompts]


@pytest.mark.parametrize("workers", [0, 2])
def test_rejected_rows_carry_field_and_reason(workers):
    rejected = {row.id: row for batch in loaded(workers, stop=3) for row in batch.rejected}
    assert (rejected["r3"].field, rejected["r3"].reason, rejected["r3"].line) == ("images", "a.png: no such file", 4)
    assert (rejected["r5"].field, rejected["r5"].reason) == ("messages", "too long")
    assert (rejected["r7"].field, rejected["r7"].reason) == ("boxes", "odd")


def test_tensors_arrive_whole_and_writable():
    def encode_dtypes(row, index):
        return [
            torch.zeros(2, 3, dtype=torch.uint8),
            torch.tensor([True]),
            torch.ones(3)[::2],
            torch.tensor(7),
            torch.empty(0),
        ]

    (batch,) = loaded(1, stop=1, encode=encode_dtypes)
    picture, flags, strided, scalar, empty = batch.prompts[0]
    assert (picture.shape, picture.dtype) == ((2, 3), torch.uint8)
    picture += 1
    assert (flags.dtype, strided.tolist(), int(scalar), empty.shape) == (torch.bool, [1.0, 1.0], 7, (0,))


def test_no_file_descriptor_is_spent_on_a_tensor():
    def many(row, index):
        return [torch.tensor([index]) for _ in range(200)]

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, limits[1]))
    try:
        batches = loaded(2, stop=3, encode=many)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sum(len(prompt) for batch in batches for prompt in batch.prompts) == 12 * 200


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unexpected_error_names_the_row(workers):
    def broken(row, index):
        return {}["missing"]

    with pytest.raises(TrainingError, match=r"encoding row r\d+ \(r\.jsonl:\d+\) failed with KeyError: 'missing'"):
        loaded(workers, encode=broken)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_machine_is_not_the_rows(workers):
    def unequipped(row, index):
        raise EnvironmentProblem("pip install something")

    with pytest.raises(EnvironmentProblem, match="pip install something"):
        loaded(workers, encode=unequipped)


@pytest.mark.parametrize(("most", "rows"), [(1, 8), (10**6, 28)])
def test_workers_are_ahead_by_bytes(monkeypatch, most, rows):
    monkeypatch.setattr("tiercel.data.parallel_map.BYTES_AHEAD", most)
    done = multiprocessing.Value("i", 0)

    def counted(row, index):
        with done.get_lock():
            done.value += 1
        return torch.zeros(5_000, dtype=torch.uint8) if most > 1 else torch.zeros(500_000, dtype=torch.uint8)

    with StepLoader(ROWS, counted, ORDER, start=0, stop=7, workers=1) as loader:
        end = time.monotonic() + 30
        while done.value < rows and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        assert done.value == rows  # with a limit of one byte: a slice that is being sent, and the next one
        assert [len(batch.prompts) for batch in loader] == [4] * 7


def test_a_killed_worker_is_reported_at_once():
    def doomed(row, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(row, index)

    began = time.monotonic()
    with (
        pytest.raises(TrainingError, match=r"tiercel-loader-0 \(process \d+\) was killed by SIGKILL; .*data\.workers"),
        StepLoader(ROWS, doomed, ORDER, start=0, stop=7, workers=2) as loader,
    ):
        list(loader)
    assert time.monotonic() - began < 50


def test_a_worker_killed_while_it_sends_is_reported():
    def large(row, index):
        return torch.zeros(10_000_000, dtype=torch.uint8)

    with StepLoader(ROWS, large, ORDER, start=0, stop=7, workers=1) as loader:
        time.sleep(0.5)  # by now it waits in the middle of sending
        os.kill(loader.workers.processes[0][0].pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="killed by SIGKILL"):
            next(loader)


def test_a_worker_that_exits_is_reported():
    with pytest.raises(TrainingError, match="ended with exit code 7"):
        loaded(1, encode=lambda row, index: os._exit(7))


def test_workers_pass_over_the_signals_of_the_process_group():
    with StepLoader(ROWS, encode, ORDER, start=0, stop=7, workers=2) as loader:
        first = next(loader)
        for process, _ in loader.workers.processes:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        assert summary([first, *loader]) == summary(loaded(0))


def test_closing_ends_workers_that_are_busy():
    def slow(row, index):
        time.sleep(60)

    began = time.monotonic()
    with StepLoader(ROWS, slow, ORDER, start=0, stop=7, workers=2) as loader:
        processes = [process for process, _ in loader.workers.processes]
    assert time.monotonic() - began < 50
    assert not any(process.is_alive() for process in processes)
    assert list(loader) == []


@pytest.mark.parametrize("end", ["SIGKILL", "SystemExit"])
def test_workers_do_not_outlive_a_process_that_never_closed_them(end, tmp_path):
    with (tmp_path / "said").open("wb") as out, (tmp_path / "errors").open("wb") as err:
        process = commands().start([end], out, err, module="tests.data.unclosed_loader")
    assert process.wait(60) == (-signal.SIGKILL if end == "SIGKILL" else 0), (tmp_path / "errors").read_text()
    pids = [int(pid) for pid in (tmp_path / "said").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_steps_start_no_workers():
    loader = StepLoader(ROWS, encode, ORDER, start=3, stop=3, workers=2)
    assert loader.workers is None
    assert list(loader) == []


def test_the_order_must_be_of_these_rows():
    with pytest.raises(ValueError, match="5 rows, not for 11"):
        StepLoader(ROWS, encode, steps_of(counts=(5,)), start=0, stop=1, workers=0)


def test_the_environment_is_left_as_it_was(monkeypatch):
    def seen(row, index):
        return os.environ["TOKENIZERS_PARALLELISM"], torch.get_num_threads()

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (batch,) = loaded(1, stop=1, encode=seen)
    assert batch.prompts[0] == ("false", 1)
    assert "TOKENIZERS_PARALLELISM" not in os.environ

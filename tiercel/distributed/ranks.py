"""Provide the rank of this process, and all collectives except those of gradients.

torch.distributed pickles the messages. Ranks trust each other, because they are processes of one user. No file is
unpickled.
"""

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tiercel.errors import EXIT_STALL, ElsewhereError, EnvironmentProblem, StallError, Terminated, TiercelError
from tiercel.message_text import counted
from tiercel.processes import boot_id, launched_rank
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.reliability.stall import RankStatus, code_path, code_place, culprits

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One of `world_size` processes, and one of the `local_size` of its machine. Every method is a collective: all
    ranks call it, in the same order."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # of the machine's ranks; not every launcher sets LOCAL_RANK and LOCAL_WORLD_SIZE
    local_size: int = 1
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the run directory and prints messages."""
        return self.rank == 0

    def all_gather(self, value: T, *, anywhere: bool = False) -> list[T]:
        """Return every rank's value, in the order of the ranks. Raises StallError if a rank is at another place in the
        code, so that its value belongs to another collective. With `anywhere`, the places are not checked."""
        if self.world_size == 1 or self.heartbeat.maybe_fail("collective"):
            return [value] * self.world_size
        found: list[Any] = [None] * self.world_size
        with self.heartbeat.collective(f"gather ({code_place(_calling_frame())})"):
            dist.all_gather_object(found, (self._status(), value))
        if not anywhere:
            _require_one_place(self.rank, [status for status, _ in found])
        return [value for _, value in found]

    def _status(self) -> RankStatus:
        doing = self.heartbeat.activity
        return RankStatus(
            rank=self.rank,
            phase=doing.phase,
            phases=doing.phases,
            step=doing.step,
            waits_in=doing.collective,
            path=code_path(sys._getframe()),
            quiet_seconds=0.0,
            limit_seconds=0.0,
        )

    def gather_on_first(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, and an empty list on the others."""
        if self.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.is_first else None
        with self.heartbeat.collective(f"gather to rank 0 ({code_place(_calling_frame())})"):
            dist.gather_object(value, found)
        return found or []

    def all_reduce_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up the values of each name. A rank may lack a name. The sum is rounded once, so it does not depend on the
        order of the ranks."""
        every = self.all_gather({name: float(value) for name, value in values.items()})
        names = sorted({name for each in every for name in each})
        return {name: _sum([each.get(name, 0.0) for each in every]) for name in names}

    def all_reduce_mean(self, name: str, total: float, count: int) -> dict[str, float]:
        """Divide the sum of all ranks' totals by the sum of their counts. Return {name: mean}, or an empty dict if the
        counts are 0."""
        sums = self.all_reduce_sums({"total": total, "count": count})
        return {name: sums["total"] / sums["count"]} if sums["count"] else {}

    def all_reduce_maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the largest value of each name. A rank may lack a name."""
        return largest_by_name(self.all_gather(dict(values)))

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of all ranks' values."""
        return sum(self.all_gather(value))

    def all_reduce_max(self, value: int) -> int:
        """Return the largest value of all ranks."""
        return max(self.all_gather(value))

    def all_reduce_any(self, value: bool) -> bool:
        """Return whether the value of any rank is true."""
        return any(self.all_gather(value))

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run an action on all ranks and return each rank's own result. If it fails on a rank, all ranks raise: the
        first failed rank its TiercelError, the others ElsewhereError."""
        if self.world_size == 1:
            return action()
        result: list[T] = []
        error: TiercelError | None = None
        try:
            result.append(action())
        except TiercelError as raised:
            error = raised
        ends = self.all_gather(None if error is None else (error.exit_code, str(error)))
        failed = [(rank, *end) for rank, end in enumerate(ends) if end is not None]
        if not failed:
            return result[0]
        if error is None or failed[0][0] != self.rank:
            error = ElsewhereError(*failed[0])
        error.is_of_all_ranks = True
        raise error

    def in_turns(self, action: Callable[[], T]) -> T:
        """Run an action on one rank of each machine after the other, and return each rank's own result."""
        result: list[T] = []
        for turn in range(self.all_reduce_max(self.local_size)):
            is_own = turn == self.local_rank
            self.run_on_all(lambda is_own=is_own: result.append(action()) if is_own else None)  # type: ignore[misc]
        return result[0]

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only, and return its result on every rank."""
        if self.world_size == 1:
            return action()
        outcome = [self.run_on_all(lambda: action() if self.is_first else None)]
        with self.heartbeat.collective(f"broadcast from rank 0 ({code_place(_calling_frame())})"):
            dist.broadcast_object_list(outcome)
        return outcome[0]  # type: ignore[return-value]

    def send(self, moves: Sequence[tuple[int, int]], payloads: Mapping[int, Any]) -> dict[int, Any]:
        """Send objects from rank to rank. `moves` are pairs (sender, receiver), the same sequence on every rank.
        `payloads` are the objects that this rank sends, by the number of the move. Return the objects that it received,
        by number."""
        received: dict[int, Any] = {}
        for number, (sender, receiver) in enumerate(moves):
            if self.rank == sender == receiver:
                received[number] = payloads[number]
            elif self.rank == sender:
                with self.heartbeat.collective(f"send to rank {receiver}"):
                    dist.send_object_list([payloads[number]], dst=receiver)
            elif self.rank == receiver:
                slot: list[Any] = [None]
                with self.heartbeat.collective(f"receive from rank {sender}"):
                    dist.recv_object_list(slot, src=sender)
                received[number] = slot[0]
        return received

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Sum the tensors of all ranks in place. `what` is a name for messages."""
        if self.world_size == 1 or self.heartbeat.maybe_fail(what):
            return
        with self.heartbeat.collective(f"sum of {what} ({code_place(_calling_frame())})"):
            dist.all_reduce(tensor)
            if tensor.is_cuda:  # NCCL's call returns at once; the rank waits for the others here
                torch.cuda.current_stream().synchronize()


ALONE = Ranks()
JOINED = count()  # process groups that this process has made
MET: dict[tuple[str, ...], tuple[dist.Store, int, int]] = {}


def largest_by_name(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name. Some mappings may lack a name."""
    names = sorted({name for each in every for name in each})
    return {name: max(each[name] for each in every if name in each) for name in names}


def _calling_frame() -> FrameType:
    """Return the frame outside this file that called a collective."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _require_one_place(rank: int, statuses: Sequence[RankStatus]) -> None:
    """Raise on all ranks if they meet in a collective at different places in the code: StallError on the first rank,
    and ElsewhereError on the others."""
    if all(status.position == statuses[0].position for status in statuses):
        return
    if rank > 0:
        raise ElsewhereError(0, EXIT_STALL)
    guilty = ", ".join(str(status.rank) for status in culprits(statuses))
    places = [
        f"  rank {status.rank}: {status.waits_in}, phase {status.phase} of step {status.step}" for status in statuses
    ]
    raise StallError(
        "\n".join([f"the ranks are at different places in the code: rank {guilty} skipped a collective", *places])
    )


def _sum(values: Sequence[float]) -> float:
    """Add up values, rounded once. With NaN or infinite values the sum is NaN or infinite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


@contextmanager
def joined_ranks(timeout_seconds: float, heartbeat: Heartbeat) -> Iterator[Ranks]:
    """Join the ranks that a launcher started; without a launcher, this rank is alone. GPU tensors use NCCL, CPU tensors
    gloo. A collective fails if it waits longer than the timeout."""
    if launched_rank() is None or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks(heartbeat=heartbeat)
        return
    heartbeat.begin("join", 0)
    with heartbeat.collective("joining the others"):
        patience, has_gpu = timedelta(seconds=timeout_seconds), torch.cuda.is_available()
        whole, rank, world_size = _meeting_place(patience)
        # torchrun's store outlives a group, and would still have the addresses of an earlier run of this process
        store = dist.PrefixStore(f"run-{next(JOINED)}", whole)
        if has_gpu:
            torch.cuda.set_device(_own_gpu(store, rank))
        dist.init_process_group(_backend(has_gpu), store=store, rank=rank, world_size=world_size, timeout=patience)
        machines: list[Any] = [None] * world_size
        dist.all_gather_object(machines, _machine())
    own = machines[rank]
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=machines[:rank].count(own),
        local_size=machines.count(own),
        heartbeat=heartbeat,
    )
    try:
        yield ranks
    except Terminated:  # of all ranks; the launcher ends the others as soon as one has ended, so rank 0 closes first
        with suppress(Exception):
            ranks.all_gather(None)
        raise
    dist.destroy_process_group()  # not after an error, because the others may still be in a collective


def require_group(device: torch.device) -> None:
    """Make a process group of one rank if no launcher started this process: FSDP2 and DeepSpeed always need a group."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device.type == "cuda"), store=dist.HashStore(), rank=0, world_size=1)


def _meeting_place(patience: timedelta) -> tuple[dist.Store, int, int]:
    """Meet the other ranks, once in a process: a store of rank 0 ends with the last reference to it, when other ranks
    may already use it for the next run. Returns the store, this rank and the number of ranks."""
    where = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if where not in MET:
        MET[where] = next(dist.rendezvous("env://", timeout=patience))
    return MET[where]


def _own_gpu(store: dist.Store, rank: int) -> int:
    """Return the number of this rank's GPU: its place among the ranks of its machine, or 0 if it sees one GPU that is
    its own. Raises EnvironmentProblem if the machine has fewer GPUs than ranks."""
    gpus = torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        own = int(os.environ["LOCAL_RANK"])
    elif gpus == 1:
        own = 0
    else:
        store.set(f"host-{rank}", _machine())
        hosts = [store.get(f"host-{each}") for each in range(rank + 1)]
        own = hosts[:rank].count(hosts[rank])
    if own >= gpus:
        raise EnvironmentProblem(
            f"this machine has {counted(gpus, 'GPU')} for its ranks, and this is the rank with the number {own} of it; "
            "start one rank for each GPU, or change CUDA_VISIBLE_DEVICES"
        )
    return own


def _machine() -> str:
    """Return a name that differs between machines, also if their containers have equal host names."""
    try:
        return f"{platform.node()} {boot_id()}"
    except OSError:
        return platform.node()


def _backend(has_gpu: bool) -> str:
    return "cpu:gloo,cuda:nccl" if has_gpu else "gloo"

"""One of two ranks that try the collectives of a run: a sum over tensors, and gathering objects.

torch.distributed pickles the gathered objects, between two processes of this user that the doctor itself started.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tiercel.doctor.collectives import DONE, RANKS


def main(arguments: list[str]) -> None:
    """Try the collectives. Arguments: the backend, this rank, the port of rank 0 on the loopback interface, and the
    seconds until a collective fails."""
    backend, rank, port, seconds = arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=seconds),
    )
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    gathered: list[int | None] = [None] * RANKS
    dist.all_gather_object(gathered, rank)
    if not bool((total == sum(range(1, RANKS + 1))).all()) or gathered != list(range(RANKS)):
        sys.exit(f"wrong result: the sum is {total[0].item():g}, the gathered values are {gathered}")
    dist.barrier()
    print(DONE, flush=True)
    os._exit(0)  # threads of gloo may abort an interpreter that shuts down

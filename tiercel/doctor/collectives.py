"""Whether two processes of this machine can run collectives: by gloo, and by NCCL where there are two GPUs."""

import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from tiercel.doctor.child import Child
from tiercel.doctor.devices import IMPORT_SECONDS
from tiercel.doctor.verdict import Verdict

WORKER = "tiercel.doctor.collective_worker"
DONE = "tiercel-collectives-done"  # the last line of a rank that succeeded
RANKS = 2
TIMEOUT_SECONDS = 30.0

NO_INTERFACE = (
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME does not name an interface of this machine; unset it, or use one of"
)
SLOW_CONNECTION = (
    "a firewall, or an interface that the processes cannot use: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one of"
)

# A pattern of the error, and its likely cause with the remedy; the first match counts. "{interfaces}": this machine's.
CAUSES = (
    (r"Unable to find address for|no socket interface found|ifa != nullptr|ifname", f"{NO_INTERFACE} {{interfaces}}"),
    (r"/dev/shm|shared memory|No space left", "/dev/shm is too small: in a container, use docker run --shm-size=8g"),
    (r"address already in use|EADDRINUSE", "another process took the port in the meantime: run tiercel doctor again"),
    (r"resolve|Name or service not known|getaddrinfo", "add this machine's name to /etc/hosts"),
    (r"timed? ?out|no answer|refused|unreachable|reset by peer", f"{SLOW_CONNECTION} {{interfaces}}"),
    (r"NCCL", "run it again with NCCL_DEBUG=INFO, which names the cause; NCCL_P2P_DISABLE=1 helps on some boards"),
)
OTHER_CAUSE = f"{SLOW_CONNECTION} {{interfaces}}"


def collective_verdicts(gpu_count: int) -> Iterator[Verdict]:
    """Judge the machine's name, then each backend that a run here would use."""
    yield host_name(socket.gethostname())
    yield collective_verdict("gloo")
    if gpu_count >= RANKS:
        yield collective_verdict("nccl")


def host_name(name: str) -> Verdict:
    """Judge whether the machine's name resolves: gloo asks for its address."""
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME; ranks on other machines will not find this one"
        found = f"{name} does not resolve: {error}"
        return Verdict(name="host name", status="warning", found=found, remedy=remedy)
    return Verdict(name="host name", status="ok", found=f"{name} resolves to {address}")


def collective_verdict(
    backend: str, environment: Mapping[str, str] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> Verdict:
    """Let two processes sum a tensor and gather objects. `environment` is added to theirs."""
    name = f"{backend} collectives"
    port, started = free_port(), time.monotonic()
    with ExitStack() as stack:
        arguments = [(backend, str(rank), str(port), str(timeout_seconds)) for rank in range(RANKS)]
        children = [stack.enter_context(Child(WORKER, *each, environment=environment)) for each in arguments]
        failures = _failures(children, started + IMPORT_SECONDS + timeout_seconds)
    if failures:
        return Verdict(name=name, status="broken", found="; ".join(failures), remedy=likely_cause(" ".join(failures)))
    found = f"all_reduce and all_gather_object between {RANKS} processes"
    return Verdict(name=name, status="ok", found=found)


def likely_cause(error: str) -> str:
    """Return the remedy for an error of the processes."""
    found = (cause for pattern, cause in CAUSES if re.search(pattern, error, re.IGNORECASE))
    return next(found, OTHER_CAUSE).format(interfaces=", ".join(name for _, name in socket.if_nameindex()))


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _failures(children: Sequence[Child], deadline: float) -> list[str]:
    """Return the errors of the ranks that did not finish, each text once."""
    failures = []
    for child in children:
        try:
            while (line := child.line(deadline - time.monotonic())) not in (None, DONE):
                pass
            if line is None:
                failures.append(child.ending().text)
        except TimeoutError:
            failures.append(child.last_error() or "no answer")
    return list(dict.fromkeys(failures))

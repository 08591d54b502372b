"""Run tiercel on a Ray cluster: Ray places trainer ranks and vLLM servers, and what dies is replaced.

    python docs/launch/tiercel_ray.py docs/launch/ray.yaml

Every rank and every server is a process of its own, below a Ray actor. A server that ends is started again at its
address; meanwhile the ranks use the others. When a rank ends with an error, all ranks are ended and started again, and
go on from the newest checkpoint. The exit code is tiercel's.
"""

import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

DONE, USER, TRAINING, TAKEN, STOPPED = 0, 2, 3, 5, 75  # tiercel's exit codes
FINAL = (DONE, USER, TAKEN, STOPPED)  # another attempt would end in the same way
KEY = "VLLM_API_KEY"
ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
POLL_SECONDS = 0.5
GRACE_SECONDS = 20  # between SIGTERM and SIGKILL
START_SECONDS = 1800  # for a cluster that grows, and servers of large models
SET_PARENT_DEATH_SIGNAL = 1  # of prctl


class Ended(Exception):
    """Raised where the run cannot begin or go on, with the exit code."""

    def __init__(self, code: int, message: str):
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Describes the ranks or the servers: their number and the resources of each. The rest is of servers alone."""

    count: int
    each: dict[str, float]
    python: str = "python"
    flags: str = ""
    first_port: int = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Holds the YAML file."""

    recipe: str
    ranks: Part
    servers: Part
    command: str = "grpo"
    overrides: Sequence[str] = ()
    max_restarts: int = 3
    placement: str = "PACK"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Describes where Ray has placed a rank. `devices`: ids of its GPUs."""

    node: str
    address: str
    port: int  # a free one
    devices: tuple[str, ...]


class Child:
    """Is an actor with one process, which does not outlive it."""

    process: "subprocess.Popen[bytes] | None" = None

    def run(self, words: Sequence[str], environment: dict[str, str], orphaned: int = signal.SIGKILL) -> int:
        """Run a process to its end and end all that it leaves behind. `orphaned`: the signal that it gets when this
        actor is lost. SIGKILL is a rank's: while it saved, the next attempt would write too. Returns the exit code, or
        minus the signal."""
        prctl = ctypes.CDLL(None).prctl
        self.process = subprocess.Popen(
            words,
            env={**os.environ, **environment},
            cwd=environment["PWD"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(SET_PARENT_DEATH_SIGNAL, orphaned),
        )
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process, which may be about to begin."""
        while self.process is None:
            time.sleep(POLL_SECONDS)
        self.process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM, and later SIGKILL to all that is left."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Rank(Child):
    """Runs a trainer rank."""

    def place(self) -> Place:
        """Say where this rank is."""
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        with socket.socket() as found:
            found.bind((address, 0))
            port = found.getsockname()[1]
        devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Place(node=context.get_node_id(), address=address, port=port, devices=devices)


class Server(Child):
    """Runs a vLLM server, again and again. When the actor is lost, Ray makes it anew."""

    def __init__(self, words: Sequence[str], port: int, environment: dict[str, str], max_restarts: int):
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.restarts_left = max_restarts
        self.has_answered = self.is_over = False
        words = [*words, "--host", ray.util.get_node_ip_address(), "--port", str(port)]
        threading.Thread(target=self._keep, args=(words, environment), daemon=True).start()

    def url(self) -> str | None:
        """Wait until the server answers and return its address; None where it does not start any more."""
        while not self.is_over:
            time.sleep(POLL_SECONDS)
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"http://{self.address}/health", timeout=2, trust_env=False)
                if answer.status_code == 200 and self.process is not None:
                    self.has_answered = True
                    return f"http://{self.address}"
        return None

    def end(self) -> None:
        """End the server for good."""
        self.restarts_left = 0
        super().end()

    def _keep(self, words: Sequence[str], environment: dict[str, str]) -> None:
        while is_taken(self.address):  # by the server of an actor that was lost, or by another program
            print(f"waiting until nobody answers on {self.address}", flush=True)
            time.sleep(GRACE_SECONDS / 4)
        while not self.is_over:
            try:
                code: object = self.run(words, environment, signal.SIGTERM)  # at which vLLM ends its engine too
            except OSError as error:
                code = error
            self.is_over = not self.has_answered or self.restarts_left == 0
            self.restarts_left -= 1
            what = "" if self.is_over else "; it is started again"
            print(f"the vLLM server on {self.address} ended with {code}{what}", flush=True)


class Stops(list[int]):
    """Collects the signals that came. Ray's own handler would end this program at once."""

    def watch(self) -> None:
        """Begin to collect."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.append(number))

    def answers(self, references: Sequence[Any]) -> list[Any]:
        """Wait for the answers of actors. Raises Ended where a signal comes first, or the time is over."""
        deadline = time.monotonic() + START_SECONDS
        while len(ray.wait(references, num_returns=len(references), timeout=POLL_SECONDS)[0]) < len(references):
            if self:
                raise Ended(STOPPED, "stopped before the training")
            if time.monotonic() > deadline:
                raise Ended(TRAINING, f"not all could be started; the cluster has left {ray.available_resources()}")
        return ray.get(references)


def is_taken(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def say(text: str) -> None:
    """Speak to the user."""
    print(f"tiercel on Ray: {text}", flush=True)


def read_plan(file: Path) -> Plan:
    """Read the YAML file. Raises Ended where a key is missing or unknown."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Plan(**{**tree, "ranks": Part(**tree["ranks"]), "servers": Part(**tree["servers"])})
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise Ended(USER, f"{file}: {error}") from error


def actor_of(kind: type, part: Part, group: PlacementGroup, bundle: int, **options: Any) -> Any:
    """Make an actor class of Ray for a bundle of the placement group."""
    return ray.remote(kind).options(
        num_cpus=part.each.get("CPU", 0),
        num_gpus=part.each.get("GPU", 0),
        resources={name: amount for name, amount in part.each.items() if name not in ("CPU", "GPU")},
        max_concurrency=4,  # signals come while a process runs
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        **options,
    )


def start_servers(plan: Plan, group: PlacementGroup, environment: dict[str, str]) -> list[Any]:
    """Start the servers, with the command line that tiercel prints. Raises Ended where it refuses the recipe."""
    if plan.servers.count == 0:
        return []
    recipe = [plan.recipe, *plan.overrides, *by_servers(["http://one:1"])]
    command = [sys.executable, "-m", "tiercel", "serve", *recipe, "--print", f"--vllm={plan.servers.flags}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Ended(done.returncode, "tiercel refused the recipe; see above")
    words = shlex.split(done.stdout)
    begin, port = words.index("vllm"), words.index("--port")
    serve = [plan.servers.python, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    words = [*serve, *words[begin + 2 : port], *words[port + 2 :]]  # without "vllm serve"
    return [
        actor_of(Server, plan.servers, group, plan.ranks.count + number, max_restarts=-1, max_task_retries=-1).remote(
            words, plan.servers.first_port + number, ADAPTERS | environment, plan.max_restarts
        )
        for number in range(plan.servers.count)
    ]


def by_servers(urls: Sequence[str]) -> list[str]:
    """Return the recipe's keys for completions of these servers."""
    return ["rollout.engine=vllm-server", f"rollout.urls=[{','.join(urls)}]"] if urls else []


def rank_environments(places: Sequence[Place]) -> list[dict[str, str]]:
    """Make the variables of torch.distributed for each rank. `places`: of the ranks in their order; those of a machine
    are neighbours. Each sees the GPUs of all ranks of its machine, as under torchrun."""
    nodes = list(dict.fromkeys(place.node for place in places))
    found = []
    for rank, place in enumerate(places):
        here = [other for other, each in enumerate(places) if each.node == place.node]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": rank - here[0],
            "LOCAL_WORLD_SIZE": len(here),
            "GROUP_RANK": nodes.index(place.node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": places[0].port,
        }
        if devices := [device for other in here for device in places[other].devices]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        found.append({name: str(value) for name, value in variables.items()})
    return found


def attempt(
    plan: Plan, group: PlacementGroup, servers: Sequence[Any], environment: dict[str, str], stops: Stops
) -> int:
    """Start all ranks, each in an actor of its own, and wait for their end. Returns the exit code."""
    urls = [url for url in stops.answers([server.url.remote() for server in servers]) if url is not None]
    if servers and not urls:
        raise Ended(TRAINING, "no vLLM server is left; their last lines are above")
    if urls:
        say(f"vLLM answers on {', '.join(urls)}")
    actors = [actor_of(Rank, plan.ranks, group, bundle).remote() for bundle in range(plan.ranks.count)]
    try:
        found = stops.answers([actor.place.remote() for actor in actors])
        nodes = list(dict.fromkeys(place.node for place in found))
        order = sorted(range(len(actors)), key=lambda bundle: nodes.index(found[bundle].node))
        words = [sys.executable, "-m", "tiercel", plan.command, plan.recipe, *plan.overrides, *by_servers(urls)]
        variables = rank_environments([found[bundle] for bundle in order])
        return watch([actors[bundle] for bundle in order], words, [environment | each for each in variables], stops)
    finally:
        for actor in actors:
            ray.kill(actor)


def watch(ranks: Sequence[Any], words: Sequence[str], environments: Sequence[dict[str, str]], stops: Stops) -> int:
    """Run the ranks. Signals are passed on: at the first a rank saves and ends, at the second it ends at once. Once a
    rank has failed, the others are ended. Returns the exit code of the first that failed, or was stopped."""
    running = {rank.run.remote(words, each): rank for rank, each in zip(ranks, environments, strict=True)}
    passed_on, final = 0, DONE
    while running:
        ended, _ = ray.wait(list(running), timeout=POLL_SECONDS)
        for reference in ended:
            number = ranks.index(running.pop(reference))
            try:
                code = ray.get(reference)
            except RayActorError:
                code = -signal.SIGKILL
            if code == STOPPED:
                final = code  # the others are saving, or have
            elif code:
                say(f"rank {number} ended with {code}")
                _all(rank.end.remote() for rank in running.values())
                return code if code > 0 else TRAINING
        for stop in stops[passed_on:]:
            _all(rank.signal.remote(stop) for rank in running.values())
        passed_on = len(stops)
    return final


def _all(references: Any) -> None:
    """Wait for actors, of which some may be lost."""
    for reference in list(references):
        with suppress(RayError):
            ray.get(reference, timeout=2 * GRACE_SECONDS)


def run(plan: Plan, stops: Stops) -> int:
    """Place all, train until no further attempt would help, and return the exit code."""
    key = os.environ.get(KEY) or secrets.token_urlsafe(24)
    environment = {KEY: key, **plan.environment, "PWD": os.getcwd()}  # PWD: where all processes start
    bundles = [dict(part.each) for part in (plan.ranks, plan.servers) for _ in range(part.count)]
    group = placement_group(bundles, strategy=plan.placement)
    servers: list[Any] = []
    try:
        say(f"waiting for room for {plan.ranks.count} ranks and {plan.servers.count} vLLM servers")
        stops.answers([group.ready()])
        servers = start_servers(plan, group, environment)
        for restarts_left in reversed(range(plan.max_restarts + 1)):
            code = attempt(plan, group, servers, environment, stops)
            if code in FINAL or stops or restarts_left == 0:
                break
            say(f"all ranks are started again; after that, restarts left: {restarts_left - 1}")
        return code
    finally:
        _all([server.end.remote() for server in servers])
        remove_placement_group(group)


def main(words: Sequence[str]) -> int:
    """Run the plan of a YAML file and return the exit code."""
    stops = Stops()
    try:
        plan = read_plan(Path(*words))
        ray.init(address="auto")
        stops.watch()
        return run(plan, stops)
    except Ended as error:
        say(str(error))
        return error.code
    except ConnectionError as error:
        say(f"there is no Ray cluster: {error}")
        return USER


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

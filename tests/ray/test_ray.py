"""A run on a Ray cluster of two raylets: ranks and vLLM servers that Ray places, killed by real signals."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ray.cluster import LAUNCHER, Cluster, RayServer, launched, of_sessions, wait_for
from tests.tiny_models import save_tiny_checkpoint
from tests.training.test_loops import write_rows
from tests.training.test_resume import STEPS, final_hashes
from tests.vllm.servers import free_port, run_tiercel
from tests.vllm.test_faults import kill_while_sampling
from tests.vllm.test_runs import output_of, require_whole, rows_done, samples, wait_until
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.ray
VLLM_STEPS = 6
LONG = {"group_size": 4, "max_new_tokens": 250, "min_new_tokens": 250}  # enough time for a kill between two tokens
START_SECONDS = 300  # for vLLM on a busy machine


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint") / "qwen2_5_vl", heads=2)


def write_recipe(checkpoint: Path, directory: Path, name: str, steps: int, rollout: dict, save_every: int = 2) -> Path:
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(directory)
    tree = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "workers": 0, "max_prompt_tokens": 88},
        "rewards": [{"call": f"{directory}/mine.py:variety"}],
        "rollout": rollout,
        "optim": {"lr": 1e-2, "prompts_per_step": 4},
        "train": {"steps": steps, "save_every": save_every, "threads": 1, "strategy": "ddp"},
        "reliability": {"reward_timeout": START_SECONDS},  # a stopped rank's continues
        "output": str(directory / name),
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def require_steps_once(run: Path, steps: int) -> None:
    assert [row["step"] for row in read_metrics(run)] == list(range(1, steps + 1))


def test_one_of_two_servers_and_one_of_two_ranks_killed_lose_and_double_nothing(cluster, checkpoint, tmp_path):
    recipe, port = write_recipe(checkpoint, tmp_path, "run", VLLM_STEPS, LONG), free_port()
    run, servers = output_of(recipe), [RayServer(port=port), RayServer(port=port + 1)]
    with launched(cluster, tmp_path, recipe, 2, port) as (process, log):
        wait_until(lambda: rows_done(run) >= 1, process, log, START_SECONDS)
        sessions = cluster.sessions()
        assert len(sessions) >= 4
        done, first = kill_while_sampling(servers[1], run, 1, process, log)
        with stopped(cluster.ranks()) as ranks:  # otherwise the run would be over before the server is back
            wait_until(lambda: answers(servers[1]), process, log, START_SECONDS)
        wait_until(lambda: rows_done(run) >= done + 2, process, log)
        sessions |= cluster.sessions()
        assert servers[1].pid != first
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(START_SECONDS) == 0, log.read_text()[-5000:]
    said = log.read_text()
    assert f"{servers[1].url} is back, with policy-" in said
    assert "rank 1 ended with -9" in said and "going on from step" in said
    require_steps_once(run, VLLM_STEPS)
    require_whole(run, VLLM_STEPS)
    wait_for(lambda: not of_sessions(sessions), 30)

    alone = write_recipe(checkpoint, tmp_path, "alone", VLLM_STEPS, LONG)
    assert run_tiercel("grpo", alone).returncode == 0
    assert Counter(samples(run)) == Counter(samples(output_of(alone)))


@contextmanager
def stopped(pids: dict[int, int]) -> Iterator[dict[int, int]]:
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    yield pids
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)


def answers(server: RayServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_rank_and_an_actor_of_ray_killed_change_no_byte_of_a_run_with_its_own_engine(cluster, checkpoint, tmp_path):
    rollout = LONG | {"max_new_tokens": 64, "min_new_tokens": 64}
    whole, killed = (write_recipe(checkpoint, tmp_path, name, STEPS, rollout) for name in ("whole", "killed"))
    assert run_tiercel("grpo", whole, "--nproc", 2).returncode == 0
    run = output_of(killed)
    with launched(cluster, tmp_path, killed) as (process, log):
        wait_until(lambda: rows_done(run) >= 3, process, log)
        first = cluster.ranks()
        os.kill(first[1], signal.SIGKILL)
        wait_until(lambda: rows_done(run) == 2, process, log)  # what came after the checkpoint is cut off
        wait_until(lambda: rows_done(run) >= 3, process, log)
        second = cluster.ranks()
        assert not set(first.values()) & set(second.values())
        os.kill(parent_of(second[0]), signal.SIGKILL)
        assert process.wait(START_SECONDS) == 0, log.read_text()[-5000:]
    said = log.read_text()
    assert said.count("going on from step 2") == 2
    assert "rank 1 ended with -9" in said and "rank 0 ended with -9" in said
    require_steps_once(run, STEPS)
    assert final_hashes(run) == final_hashes(output_of(whole))
    assert rollouts(run) == rollouts(output_of(whole))


def rollouts(run: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((run / "rollouts").iterdir())]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_sigterm_to_the_launcher_saves_and_its_death_leaves_no_process_behind(cluster, checkpoint, tmp_path):
    rollout = {"group_size": 3, "max_new_tokens": 6}
    recipe = write_recipe(checkpoint, tmp_path, "run", 500, rollout, save_every=500)
    run = output_of(recipe)
    with launched(cluster, tmp_path, recipe) as (process, log):
        wait_until(lambda: rows_done(run) >= 1, process, log)
        sessions = cluster.sessions()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, log.read_text()[-5000:]
        assert len(list((run / "checkpoints").iterdir())) == 1
    done = rows_done(run)
    with launched(cluster, tmp_path, recipe) as (process, log):
        wait_until(lambda: rows_done(run) > done, process, log)
        sessions |= cluster.sessions()
    assert len(sessions) >= 4
    wait_for(lambda: not of_sessions(sessions), 30)


def test_a_server_is_started_again_at_its_address_until_no_restart_is_left(cluster, tmp_path):
    port = free_port()
    program = Path(__file__).with_name("server_lives.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path, str(port)],
        env=cluster.environment | {"PYTHONPATH": str(LAUNCHER.parent)},
        cwd=LAUNCHER.parent,  # Ray tells its workers about this directory
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *lives, last = (line.split() for line in done.stdout.splitlines() if line.startswith(("http", "None")))
    assert [url for url, _ in lives] == [f"http://127.0.0.1:{port}"] * 4
    assert len({pid for _, pid in lives}) == 4  # by the actor, by Ray, by the new actor
    assert last == ["None"]


def test_ranks_of_a_machine_are_numbered_within_it_and_share_its_gpus():
    program = (
        "from tiercel_ray import Place, rank_environments\n"
        "places = [Place(node=n, address=n, port=7, devices=(d,)) for n, d in (('a', '2'), ('a', '3'), ('b', '0'))]\n"
        "for each in rank_environments(places): print(*each.values())"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=LAUNCHER.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 3 0 2 0 a 7 2,3", "1 3 1 2 0 a 7 2,3", "2 3 0 1 1 a 7 0"]

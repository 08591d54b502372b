"""Real servers that are killed by a real signal while a run samples from them."""

import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.forked import Command
from tests.vllm.servers import ENVIRONMENT, Server, start_tiercel
from tests.vllm.test_runs import by_server, output_of, require_whole, rows_done, wait_until
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
LONG = {"group_size": 4, "max_new_tokens": 400, "min_new_tokens": 400}  # enough time to kill between two tokens
STEPS = 8  # a step may end while the server is being stopped; then the next one is used
IN_FLIGHT_SECONDS = 1.5  # for what the server had sent to be read, scored and recorded


def requests_running(server: Server) -> float:
    headers = {"Authorization": f"Bearer {ENVIRONMENT['VLLM_API_KEY']}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=30).text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))


def is_sampling(run: Path, done: int) -> bool:
    """So many steps are done, and the completions of the next one are not all there."""
    return rows_done(run) == done and not (run / "rollouts" / f"step-{done + 1:06d}.jsonl").exists()


def kill_while_sampling(server: Server, run: Path, least: int, process: Command, log: Path) -> tuple[int, int]:
    """SIGKILL to a server that has begun completions and not ended them, with `least` steps or more done. It is stopped
    first, since a step can end between a look and a signal: what waits for a stopped server stays as it is. Returns
    the number of steps done and the exit code of `tiercel serve`."""

    def has_stopped() -> bool:
        done = rows_done(run)
        if done < least or requests_running(server) == 0 or not is_sampling(run, done):
            return False
        server.signal(signal.SIGSTOP)
        time.sleep(IN_FLIGHT_SECONDS)
        if is_sampling(run, done):
            return True
        server.signal(signal.SIGCONT)
        return False

    wait_until(has_stopped, process, log)
    done = rows_done(run)
    return done, server.kill()


def retries_of_step(run: Path, step: int) -> float:
    """Prompts that were asked for again."""
    return next(row["sampler/retries"] for row in read_metrics(run) if row["step"] == step)


def test_a_server_killed_in_the_middle_of_a_step_and_started_again_loses_and_doubles_nothing(
    server_of, write_recipe, tmp_path
):
    server = server_of("qwen2_5_vl").wait()
    recipe = write_recipe(
        "qwen2_5_vl", rollout=by_server(server.url) | LONG, data={"max_prompt_tokens": 88}, train={"steps": STEPS}
    )
    run, log = output_of(recipe), tmp_path / "log"
    process = start_tiercel("grpo", recipe, output=log)
    done, code = kill_while_sampling(server, run, 2, process, log)
    assert code == 3
    again = server_of("qwen2_5_vl")
    assert is_sampling(run, done)
    again.wait()
    assert process.wait(600) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert "its prompts are tried again" in said and "is back, with policy-" in said
    assert retries_of_step(run, done + 1) > 0
    require_whole(run, STEPS)
    assert [row["policy_version"] for row in read_metrics(run) if "loss" in row] == list(range(STEPS))


def test_one_of_two_servers_killed_slows_the_run_and_does_not_end_it(fleet, server_of, write_recipe, tmp_path):
    servers = [server_of("qwen2_5_vl"), server_of("qwen2_5_vl", " too")]
    urls = [server.wait().url for server in servers]
    recipe = write_recipe(
        "qwen2_5_vl", rollout=by_server(*urls) | LONG, data={"max_prompt_tokens": 88}, train={"steps": STEPS}
    )
    run, log = output_of(recipe), tmp_path / "log"
    process = start_tiercel("grpo", recipe, output=log)
    done, code = kill_while_sampling(servers[1], run, 1, process, log)
    assert code == 3
    assert process.wait(600) == 0, log.read_text()[-3000:]
    assert f"{urls[1]} failed" in log.read_text()
    assert retries_of_step(run, done + 1) > 0
    require_whole(run, STEPS)

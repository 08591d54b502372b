"""Real servers that are killed by a real signal while a run samples from them."""

import re

import httpx
import pytest

from tests.vllm.servers import ENVIRONMENT, Server, start_tiercel
from tests.vllm.test_runs import by_server, output_of, require_whole, rows_done, wait_until
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.vllm
LONG = {"group_size": 4, "max_new_tokens": 128, "min_new_tokens": 128}  # time enough to kill between two tokens


def requests_running(server: Server) -> float:
    headers = {"Authorization": f"Bearer {ENVIRONMENT['VLLM_API_KEY']}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=5).text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))


def test_a_server_killed_in_the_middle_of_step_3_and_started_again_loses_and_doubles_nothing(
    server_of, write_recipe, tmp_path
):
    server = server_of("qwen2_5_vl").wait()
    recipe = write_recipe(
        "qwen2_5_vl", rollout=by_server(server.url) | LONG, data={"max_prompt_tokens": 88}, train={"steps": 5}
    )
    run, log = output_of(recipe), tmp_path / "log"
    process = start_tiercel("grpo", recipe, output=log)
    wait_until(lambda: rows_done(run) == 2 and requests_running(server) > 0, process, log)
    assert server.kill() == 3
    assert rows_done(run) == 2
    server_of("qwen2_5_vl").wait()
    assert process.wait(120) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert "its prompts are tried again" in said and "is back, with policy-" in said
    require_whole(run, 5)
    assert [row["policy_version"] for row in read_metrics(run) if "loss" in row] == [0, 1, 2, 3, 4]


def test_one_of_two_servers_killed_slows_the_run_and_does_not_end_it(fleet, server_of, write_recipe, tmp_path):
    servers = [server_of("qwen2_5_vl"), server_of("qwen2_5_vl", " too")]
    urls = [server.wait().url for server in servers]
    recipe = write_recipe(
        "qwen2_5_vl", rollout=by_server(*urls) | LONG, data={"max_prompt_tokens": 88}, train={"steps": 4}
    )
    run, log = output_of(recipe), tmp_path / "log"
    process = start_tiercel("grpo", recipe, output=log)
    wait_until(lambda: rows_done(run) == 1 and requests_running(servers[1]) > 0, process, log)
    assert servers[1].kill() == 3
    assert process.wait(120) == 0, log.read_text()[-3000:]
    assert f"{urls[1]} failed" in log.read_text()
    require_whole(run, 4)

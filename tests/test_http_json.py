"""What a cancelled request and the requests beside a failed one do. Answers and limits are tested where a server is
asked: tests/rollout and tests/rewards."""

import asyncio

import httpx
import pytest

from tiercel.http_json import NoAnswer, ask, environment_options, run_requests
from tiercel.log import printed
from tiercel.rollout.vllm.server import together


def test_requests_run_in_a_notebook_too():
    async def answer():
        return await asyncio.sleep(0, 7)

    async def cell():  # as ipykernel runs a cell
        return run_requests(answer())

    assert run_requests(answer()) == asyncio.run(cell()) == 7


def test_a_cancellation_that_comes_together_with_the_answer_is_not_lost():
    async def scene() -> bool:
        asking: list[asyncio.Task] = []

        async def answer_and_cancel(request: httpx.Request) -> httpx.Response:
            asking[0].cancel()
            return httpx.Response(200, json={})

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer_and_cancel)) as client:
            request = client.build_request("GET", "http://127.0.0.1/")
            asking.append(asyncio.create_task(ask(client, request, seconds=60, most_bytes=100)))
            await asyncio.wait(asking)
        return asking[0].cancelled()

    assert asyncio.run(scene())


def test_the_others_have_ended_when_a_failure_is_raised():
    ended: list[str] = []

    async def fail() -> None:
        raise ValueError("no")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # as a client that gives its connection back
            ended.append("request")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(together([wait(), fail(), wait()]))
    assert ended == ["request", "request"]


def test_a_connection_is_given_back_before_a_late_answer_is_reported():
    """Otherwise the next request of a pool with one connection would wait for it."""

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    async def scene() -> set[asyncio.Task]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as client:
            request = client.build_request("GET", "http://127.0.0.1/")
            with pytest.raises(NoAnswer):
                await ask(client, request, seconds=0.01, most_bytes=100)
            return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(scene())


@pytest.mark.parametrize(
    ("address", "variables", "proxy"),
    [
        ("https://judge.example.com/v1", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://judge.example.com/v1", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://judge.example.com/v1", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "a.org,.example.com"}, None),
        ("https://judge.example.com/v1", {"HTTP_PROXY": "http://proxy:3128"}, None),
        ("https://judge.corp:8000/v1", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "judge.corp:8000"}, None),
        ("https://judge.corp/v1", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "judge.corp:443"}, None),
        (
            "https://judge.corp/v1",
            {"HTTPS_PROXY": "HTTP://proxy:3128", "NO_PROXY": "judge.corp:8000"},
            "http://proxy:3128",
        ),
        ("https://judge.corp/v1", {"HTTPS_PROXY": "socks5://proxy:1080"}, None),
        ("https://127.0.0.5/v1", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("https://[::1]:8000/v1", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("https://127.0.0.1:8000/v1", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("http://judge.example.com/v1", {"HTTPS_PROXY": "http://proxy:3128", "HTTP_PROXY": "http://proxy:3128"}, None),
    ],
)
def test_an_https_address_is_asked_through_the_proxy_of_the_environment(monkeypatch, address, variables, proxy):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_options(address).get("proxy") == proxy


@pytest.mark.parametrize("proxy", ["http://me:hid#den@proxy:1", "http://", "http://me:hidden@proxy:65536"])
def test_a_proxy_that_is_no_address_is_refused_and_not_shown(monkeypatch, proxy):
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ValueError, match="HTTPS_PROXY is not the address") as refused:
        environment_options("https://judge.example.com/v1")
    assert "hid" not in str(refused.value)


def test_several_folders_of_certificates_are_read_and_stale_ones_are_left_out(monkeypatch, tmp_path):
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "socks5://me:hidden@proxy:1080")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "stale.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", f"{tmp_path}:{tmp_path / 'stale'}:{tmp_path}")
    lines: list[str] = []
    with printed(lines.append):
        assert list(environment_options("https://judge.example.com/v1")) == ["verify"]
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "stale"))
        assert environment_options("https://judge.example.com/v1") == {}
    assert "hidden" not in str(lines) and [line.split()[0] for line in lines] == [
        "HTTPS_PROXY", "SSL_CERT_FILE", "HTTPS_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
    ]  # fmt: skip

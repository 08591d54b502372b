"""The server as a process: who gets an answer, with which headers, and what a request can reach."""

import asyncio
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.web.report.fake_runs import make_grounding, make_sft
from tests.web.view.serving import free_port, served
from tiercel.errors import EnvironmentProblem, RunError
from tiercel.web.view import page_process
from tiercel.web.view import runs as view_runs
from tiercel.web.view.runs import Following, Runs
from tiercel.web.view.serving import TOKEN_BYTES, kept_token


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    make_grounding(made / "grounding", steps=6, rows=8)
    make_sft(made / "sft", steps=20)
    return made


@pytest.fixture(scope="module")
def page(root, tmp_path_factory):
    with served(root, state=tmp_path_factory.mktemp("state")) as found:
        yield found


def test_only_this_machine_is_listened_to(page):
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert [each for each in listening if each.endswith(f":{page.port:04X}")] == [f"0100007F:{page.port:04X}"]


def test_the_printed_address_leads_to_the_page(page):
    answer = httpx.get(page.address)
    assert answer.status_code == 303 and answer.headers["location"] == f"/{page.token}/"
    answer = httpx.get(page.address, follow_redirects=True)
    assert answer.status_code == 200 and 'id="view"' in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "<script>" not in answer.text and "onload" not in answer.text  # no inline script


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/wrong/", "/curves?run=grounding", "/events", "//"]
)
def test_without_the_token_nothing_is_answered(page, path):
    assert httpx.get(f"http://127.0.0.1:{page.port}{path}").status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.2:1", "[::2]:5"]
)
def test_a_foreign_name_is_refused_even_with_the_token(page, host):
    assert httpx.get(f"{page.root}/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80", "localhost"])
def test_a_tunnel_may_have_another_port(page, host):
    assert httpx.get(f"{page.root}/runs", headers={"host": host}).status_code == 200


def test_runs_and_their_parts(page):
    assert httpx.get(f"{page.root}/runs").text.count("<option") == 2
    for part, expected in (
        ("status", "grpo"),
        ("curves", "Held-out accuracy"),
        ("heldout", "Before and after"),
        ("ranks", "Where the time went"),
        ("details", "Rejected rows"),
        ("cards", "6,"),
    ):
        answer = httpx.get(f"{page.root}/{part}", params={"run": "grounding"})
        assert answer.status_code == 200 and expected in answer.text, part
    answer = httpx.get(f"{page.root}/compare", params=[("run", "grounding"), ("run", "sft")])
    assert "What differs in their recipes" in answer.text and "model.path" not in answer.text
    assert "No held-out row" in httpx.get(f"{page.root}/heldout", params={"run": "sft"}).text


@pytest.mark.parametrize("name", ["nobody", "../grounding", "/etc", ""])
def test_a_run_that_is_not_shown_is_not_found(page, name):
    for part in ("curves", "cards", "row", f"images/{'0' * 64}"):
        assert httpx.get(f"{page.root}/{part}", params={"run": name}).status_code == 404


def test_pictures_are_served_by_hash_alone(page, root):
    (root / "grounding" / "images" / f"{'a' * 64}.png").write_text("no picture")
    (root / "grounding" / "images" / f"{'b' * 64}.png").symlink_to("/etc/passwd")
    real = next(file.stem for file in (root / "grounding" / "images").iterdir() if file.stat().st_size > 999)
    answer = httpx.get(f"{page.root}/images/{real}", params={"run": "grounding"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/webp"
    assert "immutable" in answer.headers["cache-control"]
    names = ["a" * 64, "b" * 64, "c" * 64, "..%2fconfig.yaml", f"{real}.png", real.upper(), "%2e%2e"]
    for name in names:
        answer = httpx.get(f"{page.root}/images/{name}", params={"run": "grounding"})
        assert answer.status_code == 404 and "root:" not in answer.text, name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_but_get(page, method):
    assert httpx.request(method, f"{page.root}/curves?run=grounding").status_code == 405


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"low": "much"}, "much is not a number"),
        ({"high": "nan"}, "nan is not a number"),
        ({"steps": "last"}, "last is not a step"),
        ({"order": "prettiest"}, "no such kind"),
        ({"folder": "../.."}, "no such kind"),
    ],
)
def test_filters_that_make_no_sense_are_refused_in_words(page, parameters, said):
    answer = httpx.get(f"{page.root}/cards", params={"run": "grounding", **parameters})
    assert answer.status_code == 400 and said in answer.text


def test_the_token_is_kept_for_the_user_alone(root, tmp_path):
    port = free_port()
    file = tmp_path / "tiercel" / f"view-token-{port}"
    with served(root, state=tmp_path, port=port) as first:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == first.token
        assert len(first.token) == 32
    with served(root, state=tmp_path, port=port) as second:
        assert second.token == first.token
    with served(root, state=tmp_path) as elsewhere:
        assert elsewhere.token != first.token
    file.chmod(0o644)  # others may have read it
    with served(root, state=tmp_path, port=port) as third:
        assert third.token != first.token


def test_a_user_without_a_home_gets_a_new_token(monkeypatch):
    def nobody(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    first, second = kept_token(8420), kept_token(8420)
    assert len(first) == len(second) > TOKEN_BYTES and first != second


def test_a_taken_port_is_an_error_with_the_remedy(page, root):
    words = [sys.executable, "-m", "tiercel", "view", str(root), "--port", str(page.port)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 and "cannot be used" in result.stderr and "use another port" in result.stderr


def test_ctrl_c_ends_it_without_a_traceback(root, tmp_path):
    with served(root, state=tmp_path) as found, httpx.stream("GET", f"{found.root}/events") as events:
        assert next(events.iter_lines()) == "event: hello"
        found.process.send_signal(signal.SIGINT)  # an open page does not delay it
        assert found.process.wait(10) == 0


def test_beside_a_run_it_waits_for_it_and_ends_with_its_process(tmp_path):
    """What `--view` does, by a process that is killed: no page may stay behind."""
    run, port = tmp_path / "run", free_port()
    program = (
        "import os, subprocess, sys, time\n"
        f"words = [sys.executable, '-m', 'tiercel', 'view', {str(run)!r}, '--port', '{port}', '--beside']\n"
        "words.append(str(os.getpid()))\n"
        "subprocess.Popen(words, start_new_session=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip().partition("token=")[2]
        root = f"http://127.0.0.1:{port}/{token}"
        until = time.monotonic() + 20
        while True:
            try:
                assert "has not begun" in httpx.get(f"{root}/curves?run=run").text
                break
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.1)
        make_sft(run, steps=4)
        assert "training loss" in httpx.get(f"{root}/curves?run=run").text.lower()
        process.kill()
    with pytest.raises(httpx.TransportError):
        for _ in range(100):
            httpx.get(f"{root}/runs")
            time.sleep(0.1)


def test_the_page_beside_a_run_is_started_and_ended_with_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with page_process.page_beside(tmp_path / "run"):
        address = ""
        until = time.monotonic() + 20
        while not address.endswith("\n"):
            assert time.monotonic() < until
            address += capfd.readouterr().err
            time.sleep(0.1)
        address = address.removeprefix("page of the run: ").strip()
        assert httpx.get(address, follow_redirects=True).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(address)


def test_paths_without_a_run_are_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run and contains none"):
        Runs([tmp_path])


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for name in ("a/run", "b/run", "c"):
        make_sft(tmp_path / name, steps=1)
    assert [run.name for run in Runs([tmp_path]).all()] == ["a/run", "b/run", "c"]
    runs = Runs([tmp_path / "a"])
    assert [run.name for run in runs.all()] == ["run"]
    make_sft(tmp_path / "a" / "new", steps=1)
    assert runs.refresh() and [run.name for run in runs.all()] == ["new", "run"]
    assert not runs.refresh()


def test_a_run_that_is_being_removed_hides_no_news_of_others(tmp_path, monkeypatch):
    for name in ("a", "b"):
        make_sft(tmp_path / name, steps=1)
    runs = Runs([tmp_path])

    def gone():
        raise FileNotFoundError("pulse")

    monkeypatch.setattr(runs.named("a"), "signs", gone)
    (event,) = Following(runs)._look()
    assert '"run": "b"' in event


def test_pages_follow_on_after_what_nobody_foresaw(tmp_path, monkeypatch, capsys):
    make_sft(tmp_path / "run", steps=1)
    monkeypatch.setattr(view_runs, "LOOK_SECONDS", 0.01)
    runs, failures = Runs([tmp_path]), [1, 2]
    following, refresh = Following(runs), runs.refresh

    def failing():
        if failures:
            failures.pop()
            raise RuntimeError("unforeseen")
        return refresh()

    monkeypatch.setattr(runs, "refresh", failing)

    async def two_events():
        async with following.running():
            events = following.events()
            return [await asyncio.wait_for(anext(events), 60) for _ in range(2)]

    hello, change = asyncio.run(two_events())
    assert "event: hello" in hello and '"run": "run"' in change and failures == []
    assert capsys.readouterr().err.count("RuntimeError: unforeseen") == 1


def test_without_the_extra_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr(page_process, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"needs starlette and uvicorn: pip install 'tiercel\[view\]'"):
        page_process.require_packages()

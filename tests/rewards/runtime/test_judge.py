"""The reward `judge` against a real HTTP server that follows a script."""

import gc
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.rewards.samples import sample
from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.rewards.external import ByJudge, Judge
from tiercel.rewards.runtime import judge as judge_module
from tiercel.rewards.runtime.judge import JudgeReward
from tiercel.rewards.runtime.scorer import Scorer

LIMITS = Reliability(reward_timeout=20)
JSON = "application/json"
GOOD = b'{"choices": [{"message": {"content": "<answer>10</answer>"}}]}'
DEEP = 100_000
# By its name in an order: the body, the headers, what the failure says.
HOSTILE: dict[str, tuple[bytes, dict[str, str], str]] = {
    "bz2": (GOOD, {"Content-Type": f"{JSON}; charset=bz2"}, "content-type: charset 'bz2' came"),
    "hex": (GOOD, {"Content-Type": f"{JSON}; charset=hex"}, "content-type: charset 'hex' came"),
    "utf-16": (GOOD.decode().encode("utf-16"), {"Content-Type": f"{JSON}; charset=utf-16"}, "charset 'utf-16' came"),
    "unknown": (GOOD, {"Content-Type": f"{JSON}; charset=klingon"}, "content-type: charset 'klingon' came"),
    "gzip": (GOOD, {"Content-Encoding": "gzip"}, "content-encoding: 'gzip' came"),
    "no-utf-8": (GOOD.replace(b"10", b"\xff"), {}, "not JSON"),
    "page": (b"<html>busy</html>", {}, "not JSON"),
    "empty": (b"", {}, "not JSON"),
    "deep": (b"[" * DEEP + b"]" * DEEP, {}, "not JSON"),
    "long": (GOOD + b" " * 5_000_000, {}, "body: got more than 4,194,304 bytes"),
    "null": (b"null", {}, "answer: got None"),
    "list": (b"[]", {}, "answer: got []"),
    "no-choice": (b'{"choices": []}', {}, "choices: got []"),
    "choices-text": (b'{"choices": "10"}', {}, "choices: got '10'"),
    "choice-null": (b'{"choices": [null]}', {}, "choices[0]: got None"),
    "message-text": (b'{"choices": [{"message": "10"}]}', {}, "choices[0].message: got '10'"),
    "content-number": (b'{"choices": [{"message": {"content": 10}}]}', {}, "choices[0].message.content: got 10"),
    "content-null": (b'{"choices": [{"message": {"content": null}}]}', {}, "choices[0].message.content: got None"),
    "content-list": (b'{"choices": [{"message": {"content": [10]}}]}', {}, "choices[0].message.content: got [10]"),
}


class Script(ThreadingHTTPServer):
    """Answers each request by the first line of its completion, and keeps the requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.tries: dict[str, int] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: object, address: object) -> None:
        """A client that has given up is part of the script."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Script
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        order = question.split("order:", 1)[1].split()[0]
        with self.server.lock:
            self.server.asked.append(body)
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            tried = self.server.tries[order] = self.server.tries.get(order, 0) + 1
        try:
            self.answer(order, tried)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def answer(self, order: str, tried: int) -> None:
        kind, _, value = order.partition("=")
        if kind == "grade":
            time.sleep(0.02)
            self.reply(200, {"choices": [{"message": {"content": f"<answer>{value}</answer>"}}]})
        elif kind == "busy-once":
            self.reply(429 if tried == 1 else 200, {"choices": [{"message": {"content": value}}]})
        elif kind == "status":
            self.reply(int(value), {"error": "as told"})
        elif kind == "drop":
            self.close_connection = True
        elif kind == "sleep":
            time.sleep(float(value))
            self.reply(200, {"choices": [{"message": {"content": "10"}}]})
        elif kind == "text":
            self.reply(200, {"choices": [{"message": {"content": value}}]})
        elif kind == "odd":
            self.reply(200, {"choices": []})
        elif kind in ("hostile", "refusing"):
            body, headers, _ = HOSTILE[value]
            self.send_response(200 if kind == "hostile" else 400)
            for name, text in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)
        elif kind == "dribble":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):  # the client gives up
                for _ in range(100):
                    time.sleep(0.05)
                    self.wfile.write(b" ")
        elif kind == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()
    thread = threading.Thread(target=script.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield script
    script.shutdown()
    thread.join(timeout=5)
    script.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE", 0.01)


def scores(server: Script, *orders: str, limits: Reliability = LIMITS, truth="seven", **options):
    reward = ByJudge(judge=Judge(url=server.url, model="grader", **{"retries": 2, **options}))
    judge = JudgeReward(reward, limits)
    judge.start()
    return judge.score([sample(f"order:{order}", truth) for order in orders])


def test_grades_over_the_best_in_the_order_of_the_samples(server):
    found = scores(server, *(f"grade={number}" for number in range(11)))
    assert [each.value for each in found] == pytest.approx([number / 10 for number in range(11)])
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {body["model"] for body in server.asked} == {"grader"}
    assert "seven" in server.asked[0]["messages"][0]["content"]


def test_grades_beyond_the_scale_are_its_ends(server):
    assert [each.value for each in scores(server, "grade=12", "grade=-3", best=5)] == [1.0, 0.0]
    assert scores(server, "grade=4", best=5)[0].value == pytest.approx(0.8)


def test_so_many_at_a_time_and_no_more(server):
    found = scores(server, *(f"grade={number % 11}" for number in range(40)), concurrency=4)
    assert None not in [each.value for each in found]
    assert 2 <= server.most_at_once <= 4


def test_a_busy_server_is_asked_again(server):
    (found,) = scores(server, "busy-once=7")
    assert found.value == 0.7 and server.tries == {"busy-once=7": 2}


@pytest.mark.parametrize(
    ("order", "words", "tries"),
    [
        ("status=500", "status 500: .*as told.* (tried 3 times)", 3),
        ("status=401", "status 401", 1),
        ("drop", "disconnected", 3),
        ("sleep=3", "", 3),
        ("text=fine", "the reply contains no grade: 'fine'", 1),
        ("odd", "the reply is not a chat completion", 1),
        ("elsewhere", "status 302", 1),
    ],
)
def test_a_completion_without_a_grade_is_unscorable_and_says_why(server, order, words, tries):
    found, other = scores(server, order, "grade=5", timeout=2)
    assert found.value is None and other.value == 0.5
    assert found.failure.startswith(f"reward judge at {server.url}: row row-1: ")
    assert all(word in found.failure for word in words.split(".*")[:1])
    assert server.tries[order] == tries


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_costs_one_grade_and_says_the_field(server, name, caplog):
    found, refused, other = scores(server, f"hostile={name}", f"refusing={name}", "grade=5")
    assert found.value is None and refused.value is None and other.value == 0.5
    assert found.failure.startswith(f"reward judge at {server.url}: row row-1: the reply is not a chat completion: ")
    assert HOSTILE[name][2] in found.failure and len(found.failure) < 1000
    assert "status 400: " in refused.failure or name == "long"
    gc.collect()  # an error that a task raised and nobody requested is reported when it is collected
    assert "never retrieved" not in caplog.text


def test_a_reply_that_comes_byte_by_byte_has_the_time_of_any(server):
    started = time.monotonic()
    (found,) = scores(server, "dribble", timeout=0.3, retries=1)
    assert time.monotonic() - started < 30
    assert "no complete answer within 0.3 s" in found.failure and server.tries == {"dribble": 2}


def test_the_whole_batch_has_a_time_of_its_own(server):
    started = time.monotonic()
    found = scores(server, "grade=5", "sleep=40", limits=Reliability(reward_timeout=5.0))
    assert time.monotonic() - started < 30
    assert found[0].value == 0.5
    assert found[1].value is None and "reliability.reward_timeout = 5 s" in found[1].failure


def test_a_server_that_is_not_there_is_named(server):
    reward = ByJudge(judge=Judge(url="http://127.0.0.1:9", model="grader", retries=1))
    judge = JudgeReward(reward, LIMITS)
    judge.start()
    (found,) = judge.score([sample("order:x", "7")])
    assert found.failure.startswith("reward judge at http://127.0.0.1:9: row row-1: ") and "2 times" in found.failure


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    found = scores(server, "status=401", key="JUDGE_KEY")
    assert server.keys == ["Bearer sk-very-secret"]
    assert "sk-very-secret" not in found[0].failure
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RecipeError, match="is JUDGE_KEY, which is not set"):
        scores(server, "grade=5", key="JUDGE_KEY")


def test_a_row_without_a_right_answer_is_not_asked_about(server):
    (found,) = scores(server, "grade=5", truth=None)
    assert found.value is None and found.failure is None and server.asked == []


def test_a_question_of_ones_own(server, tmp_path):
    file = tmp_path / "question.txt"
    file.write_text("Is this polite? {completion} {{yes or no}}")
    assert scores(server, "grade=10", truth=None, prompt=str(file))[0].value == 1.0
    assert server.asked[0]["messages"][0]["content"] == "Is this polite? order:grade=10 {yes or no}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{completion} {mood}", "contains {mood}"),
        ("{prompt}", "does not contain {completion}"),
        ("{completion} {", "cannot be read"),
        ("{completion!x}", "cannot be read"),
    ],
)
def test_a_question_that_cannot_be_filled_in_is_refused(server, tmp_path, text, words):
    file = tmp_path / "question.txt"
    file.write_text(text)
    with pytest.raises(RecipeError, match=words):
        scores(server, "grade=10", prompt=str(file))


@pytest.mark.parametrize(
    ("order", "value"),
    [("text=8/10", 0.8), ("text=8.", 0.8), ("text=8/5", None), ("text=3of10", None)],
)
def test_a_grade_is_all_of_the_answer(server, order, value):
    (found,) = scores(server, order)
    assert found.value == value


def test_a_prompt_that_cannot_be_sent_is_unscorable(server):
    found, other = scores(server, "grade=1 \ud83d", "grade=5")
    assert found.value is None and "surrogates" in found.failure and other.value == 0.5


@pytest.mark.parametrize("key", ("sk-\u00e9", "sk-a\x01b"))
def test_a_key_that_is_none_is_refused_and_not_shown(server, monkeypatch, key):
    monkeypatch.setenv("MY_JUDGE", key)
    with pytest.raises(RecipeError, match="MY_JUDGE has characters") as caught:
        scores(server, "grade=5", key="MY_JUDGE")
    assert key not in str(caught.value)
    monkeypatch.setenv("MY_JUDGE", "sk-good\n")
    assert scores(server, "grade=5", key="MY_JUDGE")[0].value == 0.5
    assert server.keys == ["Bearer sk-good"]


def test_a_completion_with_braces_is_data(server):
    (found,) = scores(server, "grade=3 {prompt} {0.__class__}")
    assert found.value == 0.3
    assert "{0.__class__}" in server.asked[0]["messages"][0]["content"]


def test_the_scorer_starts_and_asks_it_like_any_other(server):
    reward = ByJudge(judge=Judge(url=server.url, model="grader"), correct_at=0.5)
    with Scorer([reward], LIMITS, "resized_pixels") as scorer:
        (found,) = scorer.score_samples([sample("order:grade=9", "7")], [None])
    assert found["judge"].value == 0.9


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, for a certificate")
def test_certificates_that_the_environment_names_are_trusted(server, tmp_path, monkeypatch):
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=judge"
    subprocess.run([*made.split(), "-addext", "subjectAltName=IP:127.0.0.1"], cwd=tmp_path, check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    variables = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    for variable in (*variables, "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)

    def grade() -> float | None:
        judge = Judge(url=server.url.replace("http", "https"), model="grader", retries=0)
        reward = JudgeReward(ByJudge(judge=judge), LIMITS)
        reward.start()
        return reward.score([sample("order:grade=7", "seven")])[0].value

    assert grade() is None
    for variable in variables:
        with monkeypatch.context() as environment:
            environment.setenv(variable, str(tmp_path / "cert.pem"))
            assert grade() == 0.7
            environment.setenv(variable, str(tmp_path / "lost.pem"))
            assert grade() is None

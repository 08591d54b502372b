"""One line from a process of the user's code: within limits, and without secrets."""

import json
import time

import pytest

from tiercel.sandbox.process import DEEPEST, MOST_NODES, ForeignReply, read_reply


def deep(depth: int) -> bytes:
    return b'{"a": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[" * 200_000, "200,000 values in one answer"),
        (b'{"a": ' * 50_000, "nested more than 64 deep"),
        (b"[" * 50_000 + b"]" * 50_000, "nested more than 64 deep"),
        (deep(DEEPEST + 1), "nested more than 64 deep"),
        (b'{"a": [' + b"[]," * (MOST_NODES // 2) + b"[]]}", "values in one answer, but at most 100,000 are"),
        (b'{"index": ' + b"9" * 5000 + b"}", "something other than its answers"),
        (b"[1]", "something other than its answers"),
        (b'{"a": "\xff"}', "something other than its answers"),
        (b'"' + b"\\" * 100_000, "something other than its answers"),
    ],
)
def test_what_is_large_deep_or_no_object_is_refused_at_once(line, said):
    started = time.perf_counter()
    with pytest.raises(ForeignReply, match=said):
        read_reply(line)
    assert time.perf_counter() - started < 2


def test_texts_may_hold_what_they_like():
    reply = {"parts": [{"text": '[{,"\\' * MOST_NODES}], "deep": json.loads(deep(DEEPEST - 1))}
    assert read_reply(json.dumps(reply).encode()) == reply


def test_half_of_a_surrogate_pair_is_a_question_mark():
    """A policy may write it as an escape, and a reward's exception may quote it."""
    reply = {"failure": "unknown label \ud83d", "parts": ["\U0001f600", r"\ud83d"]}
    assert read_reply(json.dumps(reply).encode()) == {**reply, "failure": "unknown label ?"}


def test_secrets_of_the_environment_are_taken_out(monkeypatch):
    monkeypatch.setenv("OWN_TOKEN", "canary-0123456")
    monkeypatch.setenv("HTTPS_PROXY", "http://service:canary%40proxy@proxy:3128")
    texts = [
        "by canary-0123456",
        "http://x:canary%40proxy@h",
        "canary@proxy",
        "mongodb://a:elsewhere@h",
        "/?page_token=3",
        "[redacted OWN_TOKEN]...",
    ]
    reply = read_reply(json.dumps({"parts": [{"text": text} for text in texts], "number": 7}).encode())
    assert reply["number"] == 7
    assert [part["text"] for part in reply["parts"]] == [
        "by [redacted OWN_TOKEN]",
        "http://redacted@h",
        "[redacted HTTPS_PROXY]",
        "mongodb://redacted@h",
        "/?page_token=3",
        "[redacted OWN_TOKEN]...",
    ]

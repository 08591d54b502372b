"""Answers that no correct vLLM server gives, and how the client treats each."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from tests.rollout.scripted_server import Answer, Raw

Ending = Literal["left out", "patience", "at once"]
DEEP = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileAnswer:
    """A hostile answer and its effect. `left out`: it is retried a few times, then the server is left out for good;
    `patience`: it is retried until rollout.patience is over; `at once`: the run ends, because only its user can correct
    this. `says` is a part of the message."""

    make: Callable[[Answer], Raw]
    ending: Ending
    says: str
    of_models: bool = False  # an answer to /v1/models, which a server that was lost is asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Ids of the checkpoint that the server is asked for."""

    vocabulary: int
    placeholder: int
    end: int


def hostile_answers(tokens: Tokens) -> dict[str, HostileAnswer]:
    """By what is wrong with it."""
    return {
        **_logprobs(),
        **_token_ids(tokens),
        **_choices(),
        **_prompts_and_names(),
        **_bodies(),
        **_connections(),
        **_model_lists(),
    }


def _logprobs() -> dict[str, HostileAnswer]:
    path = ("choices", 1, "logprobs", "content", 0, "logprob")
    field = "choices[1].logprobs.content[0].logprob: "
    typed = {"null": (None, "None"), "text": ("-0.5", "'-0.5'"), "true": (True, "True"), "a list": ([-0.5], "[-0.5]")}
    endless = {"NaN": float("nan"), "infinite": float("inf"), "minus infinite": float("-inf")}
    above = "choices[1].logprobs[0]: got {}; the logprob of a sampled token is a finite number of at most 0"
    numbers = {"5 too high": 4.5, "barely above 0": 0.25, "what vLLM writes for none": -9999.0}
    return {
        **{f"logprob {name}": _set(path, value, f"{field}got {shown}") for name, (value, shown) in typed.items()},
        **{f"logprob {name}": _set(path, value, "should be a finite number") for name, value in endless.items()},
        **{f"logprob {name}": _set(path, value, above.format(value)) for name, value in numbers.items()},
        "logprob beyond a float": HostileAnswer(
            make=_json(lambda answer: _put(answer, path, -12345.5), lambda text: text.replace("-12345.5", "-1e999")),
            ending="left out",
            says="should be a finite number",
        ),
        "logprob missing": _left_out(lambda answer: _at(answer, path[:-1]).pop("logprob"), f"{field}"),
        "logprobs null": _set(("choices", 1, "logprobs"), None, "choices[1].logprobs: got 0 for"),
        "logprobs a number": _set(("choices", 1, "logprobs"), 5, "choices[1].logprobs: got 5"),
        "logprobs' content text": _set(path[:4], "x", "choices[1].logprobs.content: got 'x'"),
        "one logprob too few": _left_out(lambda answer: _at(answer, path[:4]).pop(), "choices[1].logprobs: "),
        "one logprob too many": _left_out(
            lambda answer: _at(answer, path[:4]).append({"logprob": -1.0}), "choices[1].logprobs: "
        ),
        "other token ids than were scored": _set(
            (*path[:5], "token"), "token_id:3", "choices[1].logprobs[0]: got '3', but token_ids has"
        ),
    }


def _token_ids(tokens: Tokens) -> dict[str, HostileAnswer]:
    path, field = ("choices", 1, "token_ids", 0), "choices[1].token_ids[0]: "
    typed = {"negative": -1, "fractional": 5.5, "whole but fractional": 5.0, "text": "5", "null": None, "true": True}
    return {
        **{f"token id {name}": _set(path, value, f"{field}got {value!r}") for name, value in typed.items()},
        "token id a list": _set(path, [5], f"{field}got [5]"),
        "token id of 30 digits": _set(path, 10**29, field),
        "token id of 5,000 digits": HostileAnswer(
            make=_json(lambda answer: _put(answer, path, 12345), lambda text: text.replace("[12345", "[" + "9" * 5000)),
            ending="patience",
            says="number out of range",
        ),
        "token id out of the vocabulary": _set(path, tokens.vocabulary, f"{field}got {tokens.vocabulary}; ids are "),
        "token id far out of the vocabulary": _set(path, 2**31 - 1, f"{field}got {2**31 - 1}; ids are below"),
        "an image placeholder sampled": _set(path, tokens.placeholder, f"{field}got {tokens.placeholder}; it stands"),
        "tokens after an end token": _set(path, tokens.end, f"{field}got {tokens.end}; it is an end token"),
        "token ids null": _set(path[:3], None, "choices[1].token_ids: got 0"),
        "token ids an object": _set(path[:3], {"0": 5}, "choices[1].token_ids: got {'0': 5}"),
        "no token at all": _left_out(lambda answer: _lengthen(answer, 0), "choices[1].token_ids: got 0"),
        "a thousand tokens": _left_out(lambda answer: _lengthen(answer, 1000), "choices[1].token_ids: got 1000"),
        "stopped without an end token": _left_out(_without_end, "choices[1].finish_reason: got 'stop'"),
    }  # fmt: skip


def _choices() -> dict[str, HostileAnswer]:
    index, odd = (
        ("choices", 1, "index"),
        {"null": None, "text": "x", "an object": {"0": {}}, "a number": 5, "true": True},
    )
    indices = {"text": "1", "true": True, "fractional": 1.0, "negative": -1, "null": None}
    return {
        **{f"choices {name}": _set(("choices",), value, f"choices: got {value!r}") for name, value in odd.items()},
        "a choice null": _set(("choices", 1), None, "choices[1]: got None"),
        "a choice text": _set(("choices", 1), "x", "choices[1]: got 'x'"),
        "no choice": _set(("choices",), [], "choices: got [] as indices"),
        "one choice too few": _left_out(lambda answer: answer["choices"].pop(), "as indices"),
        "one choice too many": _left_out(
            lambda answer: answer["choices"].append(answer["choices"][0] | {"index": len(answer["choices"])}),
            "as indices",
        ),
        **{
            f"index {name}": _set(index, value, f"choices[1].index: got {value!r}") for name, value in indices.items()
        },
        "index twice": _set(index, 0, "choices: got [0, 0"),
        "index of none": _set(index, 70, "as indices"),
        "index missing": _left_out(lambda answer: answer["choices"][1].pop("index"), "choices[1].index: "),
        "content a number": _set(("choices", 1, "message"), {"content": 5}, "choices[1].message.content: got 5"),
        "message a list": _set(("choices", 1, "message"), [], "choices[1].message: got []"),
        "end's reason a number": _set(("choices", 1, "finish_reason"), 5, "choices[1].finish_reason: got 5"),
        "given up": _set(("choices", 1, "finish_reason"), "abort", "finish_reason: got 'abort'", "patience"),
        "end without a reason": _set(("choices", 1, "finish_reason"), None, "finish_reason: got None", "patience"),
    }  # fmt: skip


def _prompts_and_names() -> dict[str, HostileAnswer]:
    ids = ("prompt_token_ids",)
    return {
        "other prompt ids": _set((*ids, 0), 1, "the engine's prompt is not the trainer's", "at once"),
        "no prompt ids": _set(ids, None, "returns no token ids (return_token_ids)", "at once"),
        "prompt ids text": _set(ids, "5 6", "prompt_token_ids: got '5 6'"),
        "a prompt id fractional": _set((*ids, 0), 1.5, "prompt_token_ids[0]: got 1.5"),
        "another policy": _set(("model",), "policy-other-7-00000000", "it answered with 'policy-other", "patience"),
        "a model's name of a million letters": _set(("model",), "x" * 10**6, "it answered with 'xxx", "patience"),
        "model a number": _set(("model",), 5, "model: got 5"),
        "model missing": _left_out(lambda answer: answer.pop("model"), "model: "),
    }


def _bodies() -> dict[str, HostileAnswer]:
    named = {
        "bz2": "bz2",
        "hex": "hex",
        "rot13": "rot13",
        "utf-16": "utf-16",
        "unknown": "klingon",
        "latin-1": "latin-1",
    }
    nothing = "not JSON"
    texts: dict[str, bytes] = {
        "empty": b"",
        "a page": b"<html>busy</html>",
        "nested deeply": b'{"choices": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "nested deeply beside the answer": b'{"model": "m", "choices": [], "more": '
        + b'{"a":' * DEEP
        + b"1"
        + b"}" * DEEP,
        "broken off": b'{"model": "m", "choi',
        "no UTF-8": b'{"model": "\xff\xfe", "choices": []}',
        "in UTF-16": '{"model": "m"}'.encode("utf-16"),
        "twice": b'{"model": "m", "choices": []} {}',
    }
    whole: dict[str, bytes] = {"null": b"null", "a list": b"[]", "a number": b"5", "text": b'"x"'}
    return {
        **{
            f"charset {name}": _raw(
                lambda body, charset=charset: Raw(
                    body=body, headers=(("Content-Type", f"application/json; charset={charset}"),)
                ),
                f"content-type: charset '{charset}' came",
            )
            for name, charset in named.items()
        },
        "compressed": _raw(
            lambda body: Raw(body=body, headers=(("Content-Encoding", "gzip"),)), "content-encoding: 'gzip' came"
        ),
        **{f"body {name}": _raw(lambda _, it=body: Raw(body=it), nothing, "patience") for name, body in texts.items()},
        **{f"body {name}": _raw(lambda _, it=body: Raw(body=it), "answer: ") for name, body in whole.items()},
        "too long": _raw(lambda body: Raw(body=body + b" " * 12_000_000), "body: got more than"),
    }  # fmt: skip


def _connections() -> dict[str, HostileAnswer]:
    def refusing(status: int, text: str = "as told") -> Callable[[Answer], Raw]:
        return lambda answer: Raw(status=status, body=json.dumps({"error": {"message": text}}).encode())

    return {
        **{
            f"status {status}": HostileAnswer(make=refusing(status), ending="patience", says=f"{status} ")
            for status in (204, 302, 429, 500, 503)
        },
        "status 500 in bz2": HostileAnswer(
            make=lambda answer: Raw(status=500, body=b"x", headers=(("Content-Type", "text/plain; charset=bz2"),)),
            ending="patience",
            says="500 x",
        ),
        "status 500, nested deeply": HostileAnswer(
            make=lambda answer: Raw(status=500, body=b"[" * DEEP), ending="patience", says="500 [[["
        ),
        "sent elsewhere": HostileAnswer(
            make=lambda answer: Raw(status=302, headers=(("Location", "http://[::"),)),
            ending="patience",
            says="Invalid URL in location header",
        ),
        "status 400": HostileAnswer(make=refusing(400), ending="at once", says="refuses a request: as told"),
        "status 403": HostileAnswer(make=refusing(403), ending="at once", says="refuses the key"),
        "broken off amid the body": _raw(lambda body: Raw(body=body[:40], promised=4000), "RemoteProtocol", "patience"),
        "one byte at a time": _raw(lambda body: Raw(body=body, pause=0.1), "no complete answer within", "patience"),
        "no HTTP": _raw(lambda body: Raw(wire=b"SSH-2.0-OpenSSH\r\n\r\n"), "RemoteProtocolError", "patience"),
        "a length in words": _raw(
            lambda body: Raw(wire=b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"), "RemoteProtocol", "patience"
        ),
        "closed without a word": _raw(lambda body: Raw(wire=b""), "RemoteProtocolError", "patience"),
    }  # fmt: skip


def _model_lists() -> dict[str, HostileAnswer]:
    values: dict[str, tuple[Sequence[int | str], Any, str]] = {
        "no object": ((), [], "/v1/models: answer: got []"),
        "data null": (("data",), None, "/v1/models: data: got None"),
        "data empty": (("data",), [], "/v1/models: data: got []"),
        "data an object": (("data",), {"id": "base"}, "/v1/models: data: got {'id': 'base'}"),
        "a model text": (("data", 0), "base", "/v1/models: data[0]: got 'base'"),
        "id a number": (("data", 0, "id"), 5, "/v1/models: data[0].id: got 5"),
        "root a list": (("data", 0, "root"), ["base"], "/v1/models: data[0].root: got ['base']"),
        "length text": (("data", 0, "max_model_len"), "4096", "/v1/models: data[0].max_model_len: got '4096'"),
        "length infinite": (("data", 0, "max_model_len"), float("inf"), "/v1/models: data[0].max_model_len: got inf"),
    }
    return {
        f"models: {name}": HostileAnswer(
            make=_json(lambda answer, path=path, value=value: _put(answer, path, value)),
            ending="left out",
            says=says,
            of_models=True,
        )
        for name, (path, value, says) in values.items()
    }


def _set(path: Sequence[int | str], value: Any, says: str, ending: Ending = "left out") -> HostileAnswer:
    return HostileAnswer(make=_json(lambda answer: _put(answer, path, value)), ending=ending, says=says)


def _left_out(change: Callable[[Any], Any], says: str) -> HostileAnswer:
    def made(answer: Any) -> Any:
        change(answer)
        return answer

    return HostileAnswer(make=_json(made), ending="left out", says=says)


def _raw(make: Callable[[bytes], Raw], says: str, ending: Ending = "left out") -> HostileAnswer:
    return HostileAnswer(make=lambda answer: make(json.dumps(answer).encode()), ending=ending, says=says)


def _json(change: Callable[[Any], Any], rewrite: Callable[[str], str] = lambda text: text) -> Callable[[Answer], Raw]:
    return lambda answer: Raw(body=rewrite(json.dumps(change(deepcopy(answer)))).encode())


def _at(answer: Any, path: Sequence[int | str]) -> Any:
    for part in path:
        answer = answer[part]
    return answer


def _put(answer: Any, path: Sequence[int | str], value: Any) -> Any:
    """Return the answer with a value in one place, or the value itself if the path is empty."""
    if not path:
        return value
    _at(answer, path[:-1])[path[-1]] = value
    return answer


def _lengthen(answer: Any, count: int) -> None:
    choice = answer["choices"][1]
    choice["token_ids"] = [5] * count
    choice["logprobs"]["content"] = [{"token": "token_id:5", "logprob": -0.5}] * count


def _without_end(answer: Any) -> None:
    choice = answer["choices"][1]
    choice["finish_reason"] = "stop"
    choice["token_ids"][-1] = 5
    choice["logprobs"]["content"][-1]["token"] = "token_id:5"

"""Environments that misbehave: the trajectory is unscorable with a reason, nothing else is lost, and no process is
left."""

import os
import time

import pytest

from tests.environments.test_dialogues import call, play
from tiercel.environments import answer_parts

pytestmark = pytest.mark.usefixtures("no_child_left")

ENV = """
    import os
    import sys
    import time

    class Env:
        level = 2

        def reset(self, **row):
            {reset}

        def act(self):
            {act}

        def ok(self) -> str:
            return "fine"

        def get_reward(self):
            {get_reward}
    """
FAULTS = {
    "raises in reset": ({"reset": "1 / 0"}, "reset: Traceback", "ZeroDivisionError"),
    "raises in get_reward": ({"get_reward": "raise KeyError('gone')"}, "get_reward: Traceback", "KeyError: 'gone'"),
    "exits": ({"act": "os._exit(7)"}, "call act: its process ended with exit code 7"),
    "raises SystemExit": ({"act": "sys.exit('enough')"}, "call act: Traceback", "SystemExit: enough"),
    "hangs": ({"act": "time.sleep(600)"}, "call act: no answer within 5 s", "mine.py"),
    "hangs in get_reward": ({"get_reward": "time.sleep(600)"}, "get_reward: no answer within 5 s"),
    "takes memory": ({"act": "return [b'x' * 10**7 for _ in range(1000)]"}, "more than reliability.reward_memory_gb"),
    "answers a long text": ({"act": "return 'x' * (2 << 20)"}, "answered a text of 2,097,152 characters; at most"),
    "answers 1 GB": ({"act": "return 'x' * 10**9"}, "call act: "),  # too long, or too much memory: whichever is first
    "answers a corrupt picture": ({"act": "return b'\\x89PNG nonsense'"}, "is not a PNG, JPEG or WEBP image"),
    "answers half a picture": ({"act": "return HALF"}, "(embedded image): cannot be read"),
    "answers an odd part": ({"act": "return [{'type': 'audio'}]"}, "a part with the type 'audio' and the keys"),
    "answers NaN": (
        {"get_reward": "return float('nan')"},
        "get_reward: returned nan, but a reward must return a finite number,",
    ),
    "answers a text as reward": ({"get_reward": "return 'good'"}, "returned 'good', a str"),
    "prints to its connection": (
        {"act": "[os.write(n, FORGED) for n in range(3, 1024) if is_socket(n)]"},
        "something other than its answers",
    ),
    "sends 200,000 brackets": (
        {"act": "[os.write(n, b'[' * 200_000 + b'\\n') for n in range(3, 1024) if is_socket(n)]"},
        "200,000 values in one answer, but at most 100,000 are allowed; its process was killed",
    ),
}
PREAMBLE = """
import io, os, stat
from PIL import Image
stream = io.BytesIO()
Image.effect_noise((60, 60), 50).save(stream, "PNG")
HALF = stream.getvalue()[:900]
FORGED = b'{"number": 99, "parts": [], "is_done": false}\\n'

def is_socket(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}") and stat.S_ISSOCK(os.fstat(descriptor).st_mode)
"""


def source_of(**methods):
    return ENV.format(**{"reset": "pass", "act": "pass", "get_reward": "return 1", **methods})


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_own_trajectory(write, opened, prompt, name):
    methods, *reasons = FAULTS[name]
    path = write(source_of(**methods))
    with open(path, "a") as file:
        file.write(PREAMBLE)
    timeout = 5.0 if "hang" in name else 60.0
    with opened(f"{path}:Env", tools=("act", "ok"), gives_reward=True, timeout=timeout) as dialogues:
        (faulty,) = dialogues.open(prompt, [0])
        replies = play(faulty, call("act"))
        ending = faulty.end()
        assert ending.outcome is None
        for reason in (f"environment {path}:Env, row row-1: ", *reasons):
            assert reason in ending.failure
        assert "opensesame" not in ending.failure
        if not set(methods) & {"get_reward"}:
            assert replies[-1].observation is None
        if not set(methods) & {"reset"}:
            (other,) = dialogues.open(prompt, [1])
            assert play(other, call("ok"))[0].turn.answer == "fine"
            assert set(methods) == {"get_reward"} or other.end().failure is None


def test_a_fork_leaves_no_process(write, opened, prompt, tmp_path):
    act = "os.fork() or (os.setsid(), time.sleep(600)); return str(os.getpid())"
    with opened(f"{write(source_of(act=act))}:Env", tools=("act",)) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        (reply,) = play(dialogue, call("act"))
        assert dialogue.end().failure is None
        group = int(reply.turn.answer)
        assert os.path.exists(f"/proc/{group}")
    assert not os.path.exists(f"/proc/{group}")


def test_a_child_that_comes_back_answers_nothing(write, opened, prompt):
    act = "return 'parent' if os.fork() else 'child'"
    with opened(f"{write(source_of(act=act))}:Env", tools=("act",)) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        assert [reply.turn.answer for reply in play(dialogue, *[call("act")] * 3)] == ["parent"] * 3
        dialogue.end()


def test_secrets_are_neither_seen_nor_shown(write, opened, prompt, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hidden-from-it")
    reset = "raise ValueError(f\"{row['service_key']} {os.environ.get('HUB_TOKEN')}\")"
    with opened(f"{write(source_of(reset=reset))}:Env") as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        failure = dialogue.end().failure
    assert "ValueError: [redacted service_key] None" in failure


def test_an_idle_process_that_died_is_replaced(write, opened, prompt):
    with opened(f"{write(source_of(act='return str(os.getpid())'))}:Env", tools=("act",)) as dialogues:
        pids = []
        for _ in range(2):
            (dialogue,) = dialogues.open(prompt, [0])
            pids.append(play(dialogue, call("act"))[0].turn.answer)
            assert dialogue.end().failure is None
            os.kill(int(pids[-1]), 9)
            while os.path.exists(f"/proc/{pids[-1]}"):
                time.sleep(0.01)
            time.sleep(2)  # its supervisor ends next
    assert len(set(pids)) == 2


def test_closing_ends_what_still_runs(write, opened, prompt, tmp_path):
    act = "open(__file__ + '.called', 'w'); time.sleep(600)"
    with opened(f"{write(source_of(act=act))}:Env", tools=("act",), timeout=600.0) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        dialogue.answer(call("act"), 5)
        while not (tmp_path / "mine.py.called").exists():
            time.sleep(0.01)
        start = time.monotonic()
    assert time.monotonic() - start < 60  # otherwise it would continue for 600


def test_large_pictures_pass(write, opened, prompt):
    act = "return [{'type': 'image', 'image': Image.frombytes('RGB', (2000, 1000), os.urandom(6 * 10**6))}] * 2"
    path = write(source_of(act=act))
    with open(path, "a") as file:
        file.write(PREAMBLE)
    with opened(f"{path}:Env", tools=("act",)) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        (reply,) = play(dialogue, call("act"))
        assert [image.original_size for image in reply.turn.images] == [(2000, 1000)] * 2
        assert dialogue.end().failure is None


def test_an_answer_with_too_many_bytes_of_pictures_is_refused(monkeypatch):
    monkeypatch.setattr(answer_parts, "LARGEST_PICTURES", 299)
    with pytest.raises(answer_parts.UnusableAnswer, match="pictures of 300 bytes; at most 299"):
        answer_parts.parts_of([{"type": "image", "image": b"x" * 150}] * 2)

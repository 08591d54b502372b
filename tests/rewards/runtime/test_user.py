import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.rewards.runtime.conftest import children
from tests.rewards.samples import limits, sample
from tiercel.errors import RecipeError
from tiercel.log import LineHandler, shown_by
from tiercel.reward_types import RewardValue
from tiercel.rewards.runtime import user
from tiercel.rewards.runtime.user import UserReward
from tiercel.sandbox import process
from tiercel.sandbox.process import environment_without_secrets

pytestmark = pytest.mark.usefixtures("no_child_left")


def score(call, *samples, timeout=30.0):
    """Values from a process that lives for one batch."""
    reward = UserReward(call, limits(timeout))
    try:
        reward.start()
        return reward.score(samples)
    finally:
        reward.close()


def numbers(values):
    assert [value.failure for value in values] == [None] * len(values)
    return [value.value for value in values]


def is_running(pid: int) -> bool:
    """Return whether any thread is running. The first may be dead a while before the last, and only then can the parent
    know."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return any((thread / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX" for thread in threads)
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}").exists()  # a thread ended meanwhile, so ask again


def gone(pid: int) -> bool:
    for _ in range(50):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def test_the_function_sees_the_sample_and_answers_a_number_or_none(reward_file):
    call = reward_file("""
        from tiercel.reward_types import Sample, SampleImage, Turn

        def score(sample):
            assert isinstance(sample, Sample)
            assert sample.messages == (Turn(role="user", content="<image>Where?"),)
            assert sample.images == (SampleImage(path="a.png", original_size=(200, 100), processed_size=(400, 50)),)
            assert sample.columns == {"level": [1, {"deep": None}]}
            assert sample.prompt == "<image>Where?"
            return None if sample.answer is None else len(sample.completion) / sample.answer
        """)
    columns = {"level": [1, {"deep": None}]}
    values = score(call, sample("abc", 4, columns=columns), sample("d\u00e9\n", None, columns=columns))
    assert values == (RewardValue(value=0.75), RewardValue(value=None))


def test_booleans_and_numbers_in_arrays_clothes_are_numbers(reward_file):
    call = reward_file("""
        import numpy
        ANSWERS = {"a": True, "b": False, "c": 3, "d": numpy.float32(0.5), "e": numpy.array(0.25), "f": numpy.True_}

        def score(sample):
            return ANSWERS[sample.completion]
        """)
    assert numbers(score(call, *(sample(letter) for letter in "abcdef"))) == [1.0, 0.0, 3.0, 0.5, 0.25, 1.0]


def test_an_exception_fails_its_own_completion_with_its_traceback(reward_file):
    call = reward_file("""
        def score(sample):
            return 1 / len(sample.completion)
        """)
    good, bad, also_good = score(call, sample("ab"), sample("", id="row-2"), sample("a"))
    assert (good.value, also_good.value) == (0.5, 1.0)
    assert bad.value is None
    assert "row row-2" in bad.failure and call in bad.failure
    assert 'mine.py", line 3, in score' in bad.failure and "ZeroDivisionError: division by zero" in bad.failure
    assert "worker.py" not in bad.failure


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("float('nan')", "returned nan, but a reward must return a finite number"),
        ("float('-inf')", "returned -inf, but a reward must return a finite number"),
        ("10 ** 400", "returned inf, but a reward must return a finite number"),
        ("1e39", "returned 1e+39, but a reward must return a finite number"),
        ("'0.5'", "returned '0.5', a str, but a reward must return a number or None"),
        ("[0.5]", "returned [0.5], a list, but a reward must return a number or None"),
    ],
)
def test_what_is_no_finite_number_is_a_failure(reward_file, answer, reason):
    (value,) = score(reward_file(f"def score(sample):\n    return {answer}\n"), sample())
    assert value.value is None and reason in value.failure


def test_a_decimal_is_a_number(reward_file):
    call = reward_file("from decimal import Decimal\n\ndef score(sample):\n    return Decimal('0.5')\n")
    (value,) = score(call, sample())
    assert value.value == 0.5 and value.failure is None


def test_prints_do_not_disturb_and_their_last_lines_are_shown_in_failures(reward_file):
    call = reward_file("""
        import os
        import subprocess

        def score(sample):
            print('{"index": 0, "value": 99}')
            for number in range(30):
                print("line", number)
            os.write(2, b"to standard error\\n")
            subprocess.run(["echo", "from a child"])
            print("no line end", end="")
            if sample.completion == "bad":
                raise KeyError("boom")
            return 0.5
        """)
    good, bad = score(call, sample("good"), sample("bad"))
    assert good == RewardValue(value=0.5)
    text = bad.failure.partition("it printed:\n")[2]
    assert [line.strip() for line in text.splitlines()][-3:] == ["to standard error", "from a child", "no line end"]
    assert len(text.splitlines()) == 20 and "line 29" in text and "line 1\n" not in text


def test_a_hang_is_killed_with_what_it_started_and_the_next_batch_gets_a_new_process(reward_file, tmp_path):
    call = reward_file("""
        import pathlib
        import subprocess
        import time

        def score(sample):
            if sample.completion == "hang":
                child = subprocess.Popen(["sleep", "600"])
                pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
                time.sleep(600)
            return 1.0
        """)
    reward = UserReward(call, limits(5.0))
    reward.start()
    start = time.monotonic()
    before, hung, after = reward.score([sample("x"), sample("hang", id="row-2"), sample("x", id="row-3")])
    assert time.monotonic() - start < 60  # the hung one sleeps for 600
    assert before == RewardValue(value=1.0)
    assert hung.value is None and "row row-2: no answer within 5 s" in hung.failure
    assert 'mine.py", line 10 in score' in hung.failure  # where it hung
    assert after.value is None and "no answer within 5 s" in after.failure
    assert gone(int((tmp_path / "pid").read_text()))
    assert numbers(reward.score([sample("x"), sample("y")])) == [1.0, 1.0]
    reward.close()


def test_a_process_that_ends_keeps_what_it_answered_and_is_started_again(reward_file):
    call = reward_file("""
        import os

        def score(sample):
            if sample.completion == "exit":
                print("leaving")
                os._exit(7)
            return 1.0
        """)
    reward = UserReward(call, limits())
    reward.start()
    values = reward.score([sample("x"), sample("exit"), sample("x")])
    assert values[0] == RewardValue(value=1.0)
    assert all("its process ended with exit code 7" in value.failure for value in values[1:])
    assert "leaving" in values[1].failure
    assert numbers(reward.score([sample("x")])) == [1.0]
    reward.close()


def test_a_crash_names_the_signal_and_sys_exit_is_a_failure(reward_file):
    call = reward_file("""
        import os
        import signal
        import sys

        def score(sample):
            if sample.completion == "exit":
                sys.exit("enough")
            os.kill(os.getpid(), signal.SIGSEGV)
        """)
    left, crashed = score(call, sample("exit"), sample("crash"))
    assert "SystemExit: enough" in left.failure
    assert "its process was killed by SIGSEGV" in crashed.failure


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_process_that_died_between_batches_is_replaced(reward_file, is_awaited):
    reward = UserReward(reward_file("import os\ndef score(sample):\n    return os.getpid()\n"), limits())
    reward.start()
    (pid,) = numbers(reward.score([sample()]))
    os.kill(int(pid), signal.SIGKILL)
    if is_awaited:
        assert gone(int(pid))
    (other_pid,) = numbers(reward.score([sample()]))
    assert other_pid != pid
    reward.close()
    assert gone(int(other_pid))


def test_a_stop_of_the_whole_job_leaves_the_answer_to_the_trainer(reward_file):
    """A scheduler's SIGTERM reaches every process; a pool of the user's own still ends its processes by it."""
    call = reward_file("""
        import multiprocessing, os, signal, subprocess, sys, time

        def score(sample):
            os.kill(os.getppid(), signal.SIGTERM)  # of the process that watches over this one
            os.kill(os.getpid(), signal.SIGTERM)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(30)
            program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            program.terminate()
            return float((child.exitcode, program.wait(30)) == (-signal.SIGTERM, -signal.SIGTERM))
        """)
    assert [(value.value, value.failure) for value in score(call, sample(), sample())] == [(1.0, None)] * 2


def test_a_process_that_ends_during_a_batch_is_not_asked_for_it_again(reward_file, tmp_path):
    call = reward_file("""
        import os
        import pathlib

        def score(sample):
            with pathlib.Path(__file__).with_name("calls").open("a") as calls:
                calls.write("x")
            os._exit(1)
        """)
    (value,) = score(call, sample())
    assert "its process ended with exit code 1" in value.failure
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit", "BaseException", "asyncio.CancelledError"])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_is_raised_past_exception_fails_its_own_completion_too(reward_file, prefix, raised):
    call = reward_file(f"""
        import asyncio

        {prefix}def score(sample):
            if sample.completion == "bad":
                raise {raised}
            return 1.0
        """)
    before, bad, after = score(call, sample(), sample("bad"), sample())
    assert numbers([before, after]) == [1.0, 1.0]
    assert raised.rpartition(".")[2] in bad.failure


def test_an_answer_that_raises_when_it_is_looked_at_is_a_failure(reward_file):
    call = reward_file("""
        class Odd:
            @property
            def shape(self):
                raise RuntimeError("boom")

        def score(sample):
            return Odd() if sample.completion == "odd" else 1.0
        """)
    odd, good = score(call, sample("odd"), sample())
    assert "RuntimeError: boom" in odd.failure
    assert good == RewardValue(value=1.0)


def test_async_calls_run_side_by_side(reward_file):
    call = reward_file("""
        import asyncio

        async def score(sample):
            await asyncio.sleep(1.0)
            if sample.completion == "bad":
                raise ValueError("boom")
            return len(sample.completion)
        """)
    start = time.monotonic()
    *good, bad = score(call, *(sample("x" * count) for count in range(60)), sample("bad"))
    assert time.monotonic() - start < 30  # one after the other they would take 61
    assert numbers(good) == [float(count) for count in range(60)]
    assert "ValueError: boom" in bad.failure


def test_async_calls_that_hang_lose_only_themselves(reward_file):
    call = reward_file("""
        import asyncio

        async def score(sample):
            await asyncio.sleep(600 if sample.completion == "hang" else 0)
            return 1.0
        """)
    hung, good = score(call, sample("hang"), sample("good"), timeout=5.0)
    assert "no answer within 5 s" in hung.failure
    assert good == RewardValue(value=1.0)


def test_batched_functions_get_all_samples_and_may_be_async(reward_file):
    source = """
        {prefix}def score(samples):
            return [len(samples), None, samples[2].completion == "c"]

        score.batched = True
        """
    for prefix in ("", "async "):
        values = score(reward_file(source.format(prefix=prefix)), sample("a"), sample("b"), sample("c"))
        assert values == (RewardValue(value=3.0), RewardValue(value=None), RewardValue(value=1.0))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("[1.0]", "returned 1 value for 2 samples"),
        ("1.0", "a batched reward must return a list, not a float"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_batched_function_that_answers_wrongly_fails_its_whole_batch(reward_file, answer, reason):
    values = score(reward_file(f"def score(samples):\n    return {answer}\nscore.batched = True\n"), sample(), sample())
    assert [value.value for value in values] == [None, None]
    assert all(reason in value.failure for value in values)


@pytest.mark.parametrize(
    ("head", "answers", "expected"),
    [
        ("import numpy", "numpy.array([0.5, 1.0])", [0.5, 1.0]),
        ("import numpy", "(numpy.float32(0.5), numpy.bool_(True))", [0.5, 1.0]),
        ("import torch", "torch.tensor([0.5, 1.0], dtype=torch.bfloat16)", [0.5, 1.0]),
        ("import torch", "[torch.tensor(0.5), torch.tensor(True)]", [0.5, 1.0]),
        ("import torch", "torch.zeros(2, requires_grad=True)", [0.0, 0.0]),
        ("import fractions", "[fractions.Fraction(1, 2), 1]", [0.5, 1.0]),
        ("", "[0.5, None]", [0.5, None]),
    ],
)
def test_numbers_in_whatever_a_function_of_names_answers(reward_file, head, answers, expected):
    call = reward_file(f"{head}\ndef score(completions, **names):\n    return {answers}\n")
    assert [(each.value, each.failure) for each in score(call, sample(), sample())] == [(v, None) for v in expected]


def test_a_bound_function_and_one_that_is_awaited(reward_file):
    source = """
        import asyncio, functools

        def weighed(completions, scale, **names):
            return [scale] * len(completions)

        async def waits(completions, **names):
            await asyncio.sleep(0.01)
            return [0.25] * len(completions)

        score = {score}
        """
    for made, expected in (("functools.partial(weighed, scale=0.5)", 0.5), ("waits", 0.25)):
        assert numbers(score(reward_file(source.format(score=made)), sample(), sample())) == [expected] * 2


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def score(completions, **names): return None", "must return a list, not a NoneType"),
        ("def score(completions, **names): return [{'overall': 1.0}] * len(completions)", "{'overall': 1.0}, a dict"),
        ("def score(completions, **names): return {'score': 1.0}", "not a dict"),
        ("def score(completions, **names): return 'no'", "not a str"),
        ("def score(completions, **names): return [[1.0]] * len(completions)", "[1.0], a list"),
        ("def score(reward_inputs): return [{'accuracy': 1.0} for _ in reward_inputs]", "{'accuracy': 1.0}, a dict"),
        ("def score(reward_inputs, longest): return [1.0] * len(reward_inputs)", "it takes longest, which the rows"),
    ],
)
def test_functions_of_other_frameworks_fail_with_what_they_answered(reward_file, source, reason):
    values = score(reward_file(source + "\n"), sample(), sample())
    assert all(each.value is None and reason in each.failure for each in values)


def test_a_batch_larger_than_any_pipe_passes_both_ways(reward_file):
    call = reward_file("""
        def score(sample):
            print("x" * 10_000)
            if sample.completion.startswith("bad"):
                raise ValueError("y" * 3_000)
            return len(sample.completion)
        """)
    values = score(call, *(sample("x" * 20_000) for _ in range(100)), *(sample("bad") for _ in range(100)))
    assert [value.value for value in values] == [20_000.0] * 100 + [None] * 100


def test_a_column_that_json_cannot_carry_fails_its_row_alone(reward_file):
    call = reward_file("def score(sample):\n    return 1.0\n")
    odd = sample(id="row-2", columns={"fine": 1, "taken": datetime(2020, 1, 1)})
    values = score(call, sample(), odd, sample())
    assert [value.value for value in values] == [1.0, None, 1.0]
    assert "row row-2, column taken: a datetime cannot be passed to your code as JSON" in values[1].failure


def test_no_samples_need_no_process():
    assert UserReward("nowhere.py:score", limits()).score([]) == ()


def test_secrets_of_the_environment_are_not_seen(reward_file, monkeypatch):
    for name in ("SERVICE_KEY", "hub_token", "A_SECRET_NAME", "DATABASE_PASSWORD", "PLAIN"):
        monkeypatch.setenv(name, "seen")
    call = reward_file("""
        import os

        def score(sample):
            return sum(value == "seen" for value in os.environ.values())
        """)
    assert numbers(score(call, sample())) == [1.0]
    assert environment_without_secrets({"KEYBOARD": "de", "API_KEY": "x"}) == {"KEYBOARD": "de"}


def test_addresses_of_the_environment_are_seen_without_passwords():
    environment = {
        "HTTPS_PROXY": "http://service:p%40ss@proxy:3128",
        "BOTH": "http://a:b@h/x, https://ghp_token@i/",
        "ENDPOINT": "https://host/v1?model=a&api-key=abcdefghi",
        "PATH": "/bin:/usr/bin",
        "DATABASE": "postgres://u:pw@h",
    }
    assert environment_without_secrets(environment, ["DATABASE"]) == {
        "HTTPS_PROXY": "http://proxy:3128",
        "BOTH": "http://h/x, https://i/",
        "ENDPOINT": "https://host/v1?model=a&api-key=",
        "PATH": "/bin:/usr/bin",
        "DATABASE": "postgres://u:pw@h",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_trainer_cannot_be_read_by_the_users_code(reward_file):
    call = reward_file("""
        import os

        def score(sample):
            read = 0
            for name in ("environ", "mem", "maps", "fd/0"):
                try:
                    os.close(os.open(f"/proc/{sample.columns['trainer']}/{name}", os.O_RDONLY))
                    read += 1
                except PermissionError:
                    pass
            return read + 10 * bool(open("/proc/self/environ").read())
        """)
    script = f"""
import os
from tests.rewards.samples import limits, sample
from tiercel.rewards.runtime.user import UserReward

mine = UserReward({call!r}, limits())
(value,) = mine.score([sample(columns={{"trainer": os.getpid()}})])
mine.close()
print(value)
"""
    environment = {**os.environ, "OWN_TOKEN": "canary-0123456"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert "RewardValue(value=10.0, failure=None)" in done.stdout, done.stdout + done.stderr


def test_neither_the_process_nor_the_parser_imports_torch(reward_file):
    call = reward_file("""
        import sys
        from tiercel.rewards import answers, boxes

        def score(sample):
            return not {"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)
        """)
    assert numbers(score(call, sample())) == [1.0]


def test_a_file_imports_its_neighbours_and_keeps_dataclasses(reward_file):
    reward_file("FACTOR = 3\n", name="neighbour.py")
    call = reward_file(
        """
        from __future__ import annotations
        from dataclasses import dataclass
        import json as real_json
        from neighbour import FACTOR

        @dataclass(slots=True)
        class Parsed:
            length: int

        def score(sample):
            return FACTOR * Parsed(length=len(sample.completion)).length + len(real_json.dumps(1))
        """,
        name="json.py",
    )
    assert numbers(score(call.replace("mine", "json"), sample("ab"))) == [7.0]


def test_a_module_is_found_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards").mkdir()
    (tmp_path / "my_rewards" / "__init__.py").write_text("")
    (tmp_path / "my_rewards" / "boxes.py").write_text("def score(sample):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    assert numbers(score("my_rewards.boxes:score", sample())) == [2.0]


@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ("def reward(sample): ...\ndef _hidden(): ...\n", ("no function score", "its functions are: reward")),
        ("score = 3\n", ("a score",)),
        ("import a_package_that_is_missing\n", ("ModuleNotFoundError", "a_package_that_is_missing")),
        ("def score(sample)\n", ("SyntaxError", "line 1")),
        ("print('hello')\nraise RuntimeError('boom')\n", ("RuntimeError: boom", "it printed:\n  hello")),
        ("import os; os._exit(3)\n", ("its process ended with exit code 3",)),
    ],
)
def test_code_that_cannot_be_loaded_is_a_problem_of_the_recipe_at_the_start(reward_file, source, reasons):
    call = reward_file(source)
    with pytest.raises(RecipeError) as caught:
        score(call, sample())
    for reason in (call, *reasons):
        assert reason in str(caught.value)


def test_a_file_that_is_missing_and_a_module_that_is_missing_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"no_such\.py is not a file"):
        score(f"{tmp_path}/no_such.py:score", sample())
    with pytest.raises(RecipeError, match="no_such_module cannot be imported for its function score"):
        score("no_such_module:score", sample())


def test_an_import_that_hangs_ends(reward_file, monkeypatch):
    monkeypatch.setattr(process, "START_TIMEOUT", 1.0)
    with pytest.raises(RecipeError, match="no answer within 1 s"):
        score(reward_file("import time\ntime.sleep(600)\n"), sample())


def test_code_that_breaks_later_fails_the_batch_and_not_the_run(reward_file):
    call = reward_file("import os\ndef score(sample):\n    os._exit(1)\n")
    reward = UserReward(call, limits())
    reward.start()
    reward.score([sample()])
    reward_file("raise RuntimeError('edited')\n")
    (value,) = reward.score([sample()])
    assert value.value is None and "RuntimeError: edited" in value.failure
    reward.close()


def test_an_interrupted_batch_leaves_no_answer_for_the_next(reward_file):
    call = reward_file("""
        import time

        def score(sample):
            time.sleep(2 if sample.completion == "slow" else 0)
            return len(sample.completion)
        """)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    reward = UserReward(call, limits())
    reward.start()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            reward.score([sample("slow")])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert numbers(reward.score([sample("ab")])) == [2.0]
    reward.close()


def test_the_process_ends_with_a_parent_that_is_killed(reward_file, tmp_path):
    call = reward_file("""
        import os
        import pathlib
        import time

        def score(sample):
            pathlib.Path(__file__).with_name("pid.part").write_text(str(os.getpid()))
            pathlib.Path(__file__).with_name("pid.part").rename(pathlib.Path(__file__).with_name("pid"))
            time.sleep(600)
        """)
    script = (
        "import sys; from tiercel.config.schema import Reliability; from tiercel.reward_types import Sample; "
        "from tiercel.rewards.runtime.user import UserReward; "
        "sample = Sample(id='1', prompt='', completion='', token_count=0, is_truncated=False, answer=None, columns={}, "
        "images=(), coordinate_space='unit'); UserReward(sys.argv[1], Reliability()).score([sample])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, call], cwd=Path(__file__).parents[3])
    while not (tmp_path / "pid").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert gone(int((tmp_path / "pid").read_text()))


def test_close_kills_at_once_and_twice_is_no_error(reward_file):
    before = children()
    reward = UserReward(reward_file("def score(sample):\n    return 1\n"), limits())
    reward.start()
    (pid,) = children() - before
    reward.close()
    reward.close()
    assert gone(pid)


def heard(call: str, *batches: int, columns: dict | None = None) -> list[str]:
    """Return what a run's log is told about a reward that gets batches of these sizes."""
    told: list[str] = []
    reward = UserReward(call, limits())
    try:
        with shown_by(LineHandler(print, told.append)):
            reward.start()
            for count in batches:
                reward.score([sample(str(number), columns=columns or {}) for number in range(count)])
    finally:
        reward.close()
    return told


def test_what_a_reward_prints_is_told_of_each_batch_with_what_it_printed_at_its_import(reward_file):
    call = reward_file("print('loaded')\ndef score(sample):\n    print('saw', sample.completion)\n    return 1\n")
    assert heard(call, 2, 1) == [
        f"{call} printed:\n  loaded",
        f"{call} printed:\n  saw 0\n  saw 1",
        f"{call} printed:\n  saw 0",
    ]


def test_standard_error_and_a_line_without_an_end_are_told_too(reward_file):
    call = reward_file("""
        import sys

        def score(sample):
            print("one", file=sys.stderr)
            print("two", end="")
            return 1
        """)
    assert heard(call, 1) == [f"{call} printed:\n  one\n  two"]


def test_much_that_is_printed_is_told_in_part(reward_file, monkeypatch):
    monkeypatch.setattr(user, "MOST_LOGGED", 2 * process.PRINTED_LINES)
    call = reward_file("def score(sample):\n    for i in range(100):\n        print(i, 'x' * 9000)\n    return 1\n")
    first, second, last = heard(call, 1, 1, 1)
    assert first == second
    head, *lines = first.splitlines()
    assert head == f"{call} printed (80 lines before these):" and len(lines) == process.PRINTED_LINES
    assert lines[-1].startswith("  99 x") and max(map(len, lines)) == 2 + process.LONGEST_PRINTED_LINE
    assert last == f"{call}: its further output is left out of this log"


def test_secrets_that_a_reward_prints_are_not_told(reward_file, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "four words of mine")
    call = reward_file("""
        def score(sample):
            print("four words of mine", sample.columns["api_key"], "http://me:word@host")
            return 1
        """)
    (told,) = heard(call, 1, columns={"api_key": "another phrase"})
    assert told == f"{call} printed:\n  [redacted MY_PASSWORD] [redacted api_key] http://redacted@host"


def test_a_reward_that_prints_nothing_is_not_mentioned(reward_file):
    assert heard(reward_file("def score(sample):\n    return 1\n"), 3) == []

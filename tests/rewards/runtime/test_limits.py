"""What a reward's process may use and what it may leave behind: memory, files, variables, processes."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.rewards.runtime.conftest import children
from tests.rewards.samples import limits, reward, sample
from tiercel.errors import EnvironmentProblem, RecipeError
from tiercel.reward_types import RewardValue
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rewards.runtime.user import UserReward
from tiercel.sandbox.process import FOREIGN_REPLY, environment_without_secrets
from tiercel.sandbox.supervisor import describe_end, held_bytes

MARK = "TIERCEL_TEST_MARK"

pytestmark = pytest.mark.usefixtures("no_child_left", "nothing_left")


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fail if a process with the test's environment outlives it, or if a file is left in the temporary directory."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert marked_processes(str(tmp_path)) == []
    assert list(directory.iterdir()) == []


def marked_processes(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in variables:
            found.append(int(process.name))
    return found


def score(call, *samples, **keys):
    """Values from a process that lives for one batch."""
    mine = UserReward(call, limits(**keys))
    try:
        mine.start()
        return mine.score(samples)
    finally:
        mine.close()


def test_memory_is_limited_and_the_next_batch_gets_a_new_process(reward_file):
    call = reward_file("""
        def score(sample):
            hoard = []
            while sample.completion == "bad" and len(hoard) < 1000:
                hoard.append(b"x" * 10_000_000)
            return 1.0
        """)
    mine = UserReward(call, limits(reward_memory_gb=0.3))
    mine.start()
    before, bad, after = mine.score([sample(), sample("bad", id="row-2"), sample(id="row-3")])
    assert before == RewardValue(value=1.0)
    assert bad.value is None and after.value is None
    assert "row row-2: it and the processes it started used " in bad.failure
    assert "more than reliability.reward_memory_gb = 0.3 allows; its process was killed" in bad.failure
    assert mine.score([sample()]) == (RewardValue(value=1.0),)
    mine.close()


def test_memory_of_children_is_counted_with_the_functions_own(reward_file):
    call = reward_file("""
        import os
        import time

        def score(sample):
            for _ in range(4):
                if os.fork() == 0:
                    os.setsid()
                    block = b"x" * 100_000_000
                    time.sleep(600)
            time.sleep(600)
        """)
    (value,) = score(call, sample(), reward_memory_gb=0.3)
    assert "reliability.reward_memory_gb = 0.3" in value.failure


def test_memory_that_children_share_is_counted_once(reward_file):
    call = reward_file("""
        import os
        import time

        BLOCK = b"x" * 100_000_000

        def score(sample):
            for _ in range(4):
                if os.fork() == 0:
                    time.sleep(600)
            time.sleep(0.5)
            return 1.0
        """)
    assert score(call, sample(), reward_memory_gb=0.3) == (RewardValue(value=1.0),)


def test_held_memory_is_a_sum_over_processes():
    own = held_bytes([os.getpid()], enough=0)
    assert own > 1_000_000
    assert held_bytes([os.getpid(), 2**22 + 1], enough=1e15) > 1_000_000  # the second is not a process


def test_a_file_that_grows_too_large_fails_its_own_completion(reward_file):
    call = reward_file("""
        import tempfile

        def score(sample):
            with tempfile.TemporaryFile() as file:
                for _ in range(30 if sample.completion == "bad" else 5):
                    file.write(b"x" * 100_000)
            return 1.0
        """)
    bad, good = score(call, sample("bad"), sample(), reward_file_mb=1)
    assert "OSError: [Errno 27] File too large" in bad.failure
    assert "reliability.reward_file_mb = 1 limits every file that your code writes" in bad.failure
    assert good == RewardValue(value=1.0)


def test_the_temporary_directory_is_private_and_removed(reward_file, tmp_path):
    call = reward_file("""
        import os
        import pathlib
        import tempfile

        def score(sample):
            directory = pathlib.Path(tempfile.mkdtemp())
            (directory / "left").write_text("behind")
            root = pathlib.Path(os.environ["TMPDIR"])
            return 1.0 if directory.parent == root and root.stat().st_mode & 0o077 == 0 else 0.0
        """)
    mine = UserReward(call, limits())
    mine.start()
    assert mine.score([sample()]) == (RewardValue(value=1.0),)
    (directory,) = (tmp_path / "temporary").iterdir()
    assert directory.name.startswith("tiercel-reward-")
    mine.close()
    assert not directory.exists()


@pytest.mark.parametrize("escape", ["pass", "os.setsid()", "os.setsid(); os.fork() and os._exit(0)"])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("return 1.0", None),
        ("os._exit(4)", "its process ended with exit code 4"),
        ("time.sleep(600)", "no answer within 1 s"),
        ("os.kill(os.getppid(), 9); time.sleep(600)", "the process that watches over it was killed"),
    ],
)
def test_no_process_outlives_its_reward(reward_file, escape, end, reason):
    call = reward_file(f"""
        import os
        import pathlib
        import time

        def score(sample):
            if os.fork() == 0:
                {escape}
                pathlib.Path(__file__).with_name("child").touch()
                time.sleep(600)
            while not pathlib.Path(__file__).with_name("child").exists():
                time.sleep(0.01)
            {end}
        """)
    (value,) = score(call, sample(), timeout=1.0 if "no answer" in (reason or "") else 60.0)
    assert value.failure is None if reason is None else reason in value.failure


def test_a_pipe_full_of_prints_does_not_hold_up_the_end(reward_file):
    mine = UserReward(reward_file("def score(sample):\n    while True:\n        print('x' * 1000)\n"), limits(0.5))
    mine.start()
    start = time.monotonic()
    (value,) = mine.score([sample()])
    assert time.monotonic() - start < 20
    assert "no answer within 0.5 s" in value.failure
    mine.close()


def test_killing_its_own_group_ends_the_worker_alone(reward_file):
    (value,) = score(reward_file("import os\ndef score(sample):\n    os.killpg(0, 9)\n"), sample())
    assert "its process was killed by SIGKILL" in value.failure


def test_a_child_that_comes_back_from_the_function_answers_nothing(reward_file):
    call = reward_file("import os\ndef score(sample):\n    return 1.0 if os.fork() else 2.0\n")
    assert score(call, sample(), sample()) == (RewardValue(value=1.0), RewardValue(value=1.0))


def test_a_line_of_brackets_costs_its_own_batch(reward_file):
    call = reward_file("""
        import os
        import stat

        def score(sample):
            for descriptor in range(3, 300 if sample.completion == "bad" else 3):
                if os.path.exists(f"/proc/self/fd/{descriptor}") and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, b"[" * 200_000 + b"\\n")
            return 1.0
        """)
    mine = UserReward(call, limits())
    mine.start()
    (value,) = mine.score([sample("bad")])
    assert "200,000 values in one answer" in value.failure
    assert mine.score([sample()]) == (RewardValue(value=1.0),)
    mine.close()


@pytest.mark.parametrize("text", ["nonsense", "[1]", '{"index": 0, "value": 5.0}', '{"index": [], "value": "5"}'])
def test_what_is_written_to_its_connection_is_no_answer_to_a_later_batch(reward_file, text):
    call = reward_file(f"""
        import os

        def score(sample):
            for descriptor in range(3, 300 if sample.completion == "bad" else 3):
                try:
                    os.write(descriptor, b'{text}\\n')
                except OSError:
                    pass
            return 1.0
        """)
    mine = UserReward(call, limits())
    mine.start()
    values = mine.score([sample("bad"), sample()])
    failures = [value.failure for value in values if value.failure is not None]
    assert all(FOREIGN_REPLY in failure for failure in failures)  # none if all came at once
    assert mine.score([sample(), sample()]) == (RewardValue(value=1.0), RewardValue(value=1.0))
    mine.close()


def test_closing_all_descriptors_ends_the_batch(reward_file):
    call = reward_file("import os\ndef score(sample):\n    os.closerange(0, 1000)\n    return 1.0\n")
    (value,) = score(call, sample())
    assert "ended with exit code 1" in value.failure or "closed the connection" in value.failure


def test_nothing_is_left_of_a_trainer_that_is_killed(reward_file, tmp_path):
    call = reward_file("""
        import os
        import pathlib
        import re
        import time

        def score(sample):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            pathlib.Path(__file__).with_name("ready").touch()
            re.match("(a+)+b", "a" * 60)  # for years, and no other thread runs meanwhile
        """)
    script = (
        "import sys; from tiercel.config.schema import Reliability; from tiercel.reward_types import Sample; "
        "from tiercel.rewards.runtime.user import UserReward; "
        "sample = Sample(id='1', prompt='', completion='', token_count=0, is_truncated=False, answer=None, columns={}, "
        "images=(), coordinate_space='unit'); UserReward(sys.argv[1], Reliability()).score([sample])"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    trainer = subprocess.Popen([sys.executable, "-c", script, call], cwd=Path(__file__).parents[3], env=environment)
    while not (tmp_path / "ready").exists():
        assert trainer.poll() is None
        time.sleep(0.05)
    assert len(marked_processes(str(tmp_path))) == 4  # trainer, supervisor, worker, its child
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5
    while (marked_processes(str(tmp_path)) or list((tmp_path / "temporary").iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)  # the fixture checks whether this was in vain


def test_a_supervisor_that_was_stopped_does_not_hold_up_the_end(reward_file):
    before = children()
    mine = UserReward(reward_file("def score(sample):\n    return 1.0\n"), limits())
    mine.start()
    (supervisor,) = children() - before
    os.kill(supervisor, signal.SIGSTOP)
    start = time.monotonic()
    mine.close()
    assert time.monotonic() - start < 50


def test_the_ends_of_processes_in_words():
    assert describe_end(0, 5) == "its process ended with exit code 0"
    assert describe_end(-11, 5) == "its process was killed by SIGSEGV"
    assert describe_end(-40, 5) == "its process was killed by signal 40"
    assert describe_end(-signal.SIGXFSZ, 5).endswith(
        "reliability.reward_file_mb = 5 limits every file that your code writes"
    )


def test_a_reward_sees_the_secrets_that_the_recipe_names_and_no_other(reward_file, monkeypatch):
    for name in ("SERVICE_KEY", "OTHER_KEY", "HUB_TOKEN"):
        monkeypatch.setenv(name, "seen")
    call = reward_file("""
        import os

        def score(sample):
            return sum(name in os.environ for name in ("SERVICE_KEY", "OTHER_KEY", "HUB_TOKEN"))
        """)
    rewards = (reward(call=call, env=["SERVICE_KEY", "HUB_TOKEN"]), reward(call=call))
    with Scorer(rewards, limits(), "unit") as scorer:
        (values,) = scorer.score_samples([sample()], [None])
    assert [value.value for value in values.values()] == [2.0, 0.0]
    assert environment_without_secrets({"A_KEY": "1", "B_KEY": "2"}, ["A_KEY"]) == {"A_KEY": "1"}


def test_a_variable_that_is_named_and_not_set_is_a_problem_at_the_start(reward_file, monkeypatch):
    monkeypatch.delenv("SERVICE_KEY", raising=False)
    call = reward_file("def score(sample):\n    return 1.0\n")
    with (
        pytest.raises(RecipeError) as caught,
        Scorer((reward(call=call, env=["SERVICE_KEY", MARK]),), limits(), "unit"),
    ):
        pass
    assert caught.value.problems == (
        "rewards.0.env: is SERVICE_KEY, which is not set in the environment; export it, or remove it from the list",
    )


@pytest.fixture
def open_files():
    """Set how many files this process may open, until the test ends; skip if the system does not allow so many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(count):
        if before[1] != resource.RLIM_INFINITY and count > before[1]:
            pytest.skip(f"this system allows {before[1]:,} open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_starts_beside_more_than_a_thousand_open_files(reward_file, open_files):
    open_files(2048)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert score(reward_file("def score(sample):\n    return 1.0\n"), sample()) == (RewardValue(value=1.0),)
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_a_process_that_may_open_no_more_files_says_so(reward_file, open_files):
    mine = UserReward(reward_file("def score(sample):\n    return 1.0\n"), limits())
    next_one = os.open(os.devnull, os.O_RDONLY)
    os.close(next_one)
    with pytest.raises(EnvironmentProblem) as caught:
        open_files(next_one + 3)
        mine.start()
    open_files(2048)
    assert f"may have, now {next_one + 3}: ulimit -n" in str(caught.value)

"""What the launcher tells of ranks that failed."""

from types import SimpleNamespace

import pytest

from tiercel.distributed.launch import NOTES, failure_of, note_code
from tiercel.errors import EXIT_STALL, EXIT_TERMINATED, EXIT_TRAINING, EXIT_USER, ElsewhereError, TrainingError


def failure(process: int, code: int) -> SimpleNamespace:
    return SimpleNamespace(pid=process, exitcode=code)


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """A rank's own note of why it ends."""
    monkeypatch.setenv(NOTES, str(tmp_path))

    def note(process: int, code: int) -> None:
        monkeypatch.setattr("tiercel.distributed.launch.os.getpid", lambda: process)
        note_code(code)

    return note


def test_a_rank_that_was_killed_is_named_though_another_noted_that_it_lost_it(noted, tmp_path):
    noted(11, EXIT_TRAINING)
    error = failure_of(tmp_path, {0: failure(11, EXIT_TRAINING), 1: failure(12, -9)})
    assert isinstance(error, TrainingError) and "rank 1 was killed by SIGKILL" in str(error)
    assert "rank 0" not in str(error)


def test_a_rank_that_ended_without_a_word_is_named(tmp_path):
    error = failure_of(tmp_path, {1: failure(12, 1)})
    assert isinstance(error, TrainingError) and "rank 1 ended with exit code 1" in str(error)


@pytest.mark.parametrize("code", (EXIT_USER, EXIT_TRAINING, EXIT_STALL))
def test_a_rank_that_said_why_is_not_repeated(noted, tmp_path, code):
    noted(11, code)
    error = failure_of(tmp_path, {0: failure(11, code)})
    assert isinstance(error, ElsewhereError) and error.exit_code == code


def test_the_first_note_counts_where_it_is_no_loss_of_another(noted, tmp_path):
    noted(11, EXIT_STALL)
    noted(12, EXIT_TRAINING)
    error = failure_of(tmp_path, {0: failure(11, EXIT_STALL), 1: failure(13, -15)})
    assert isinstance(error, ElsewhereError) and error.exit_code == EXIT_STALL


def test_after_a_signal_to_all_that_is_the_end(tmp_path):
    (tmp_path / "stopped").touch()
    error = failure_of(tmp_path, {0: failure(11, EXIT_TERMINATED)})
    assert error.exit_code == EXIT_TERMINATED

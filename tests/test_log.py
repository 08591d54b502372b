"""The logger `tiercel` beside the user's own logging: nothing twice, nothing lost, nothing left behind."""

import logging
import subprocess
import sys

import pytest

from tiercel.log import LineHandler, logger, printed, shown_by
from tiercel.runs.progress import Progress


def own_handlers() -> list[logging.Handler]:
    return [each for each in logger.handlers if isinstance(each, LineHandler)]


def test_importing_configures_nothing_and_prints_nothing():
    program = (
        "import logging, tiercel, tiercel.log\n"
        "print(logging.getLogger().handlers, logging.getLogger('tiercel').level)\n"
        "tiercel.log.logger.warning('nobody listens')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("[] 0\n", "")


def test_without_a_run_the_users_handlers_get_the_records(caplog):
    logger.warning("a server failed")
    assert caplog.record_tuples == [("tiercel", logging.WARNING, "a server failed")]


def test_in_a_run_the_root_does_not_show_a_line_again_and_gets_the_logger_back(tmp_path, caplog, capsys):
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1):
        logger.info("a line with 100 % of {its} text")
        logger.debug("for the file")
    assert capsys.readouterr().err == "a line with 100 % of {its} text\n"
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "a line with 100 % of {its} text",
        "for the file",
    ]
    assert caplog.records == [] and own_handlers() == []
    assert (logger.level, logger.propagate) == (logging.NOTSET, True)


def test_a_handler_on_the_logger_itself_gets_what_a_run_shows(tmp_path):
    mine: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: mine.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with Progress(tmp_path / "log.txt", total_steps=1, log_every=1):
            logger.info("shown")
            logger.debug("noted")
    finally:
        logger.removeHandler(handler)
    assert mine == ["shown"]


def test_ranks_other_than_the_first_are_silent(capsys):
    with Progress(None, total_steps=1, log_every=1), printed(is_first=False):
        logger.warning("the first rank says it")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_what_is_called_between_two_steps_is_not_the_runs():
    run: list[str] = []
    command: list[str] = []
    handler = LineHandler(run.append)
    with shown_by(handler):
        with handler.without_this_thread(), printed(command.append):
            logger.info("of the user's own call")
        logger.info("of the run")
    assert (run, command) == (["of the run"], ["of the user's own call"])


def test_an_error_while_a_line_is_written_is_raised():
    def fail(text: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), printed(fail):
        logger.info("a line")
    assert own_handlers() == []

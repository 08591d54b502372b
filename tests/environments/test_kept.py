"""What is requested again is not made again, within a bound of memory."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tiercel.environments.setting import SharedCache


def kept(limit: int = 10) -> tuple[SharedCache[str], list[str]]:
    """Text, whose size is its length, and what was made so far."""
    return SharedCache(limit, len), []


def ask(texts: SharedCache[str], made: list[str], text: str) -> str:
    def make() -> str:
        made.append(text)
        return text

    return texts.get(text, make)


def test_the_least_recently_used_makes_room():
    texts, made = kept(limit=6)
    for text in ("aa", "bb", "cc", "aa", "dd", "aa", "bb"):  # dd evicts bb, and bb then evicts cc
        assert ask(texts, made, text) == text
    assert made == ["aa", "bb", "cc", "dd", "bb"]
    ask(texts, made, "dd")
    assert made == ["aa", "bb", "cc", "dd", "bb"]


def test_one_above_the_limit_is_kept_alone():
    texts, made = kept(limit=3)
    for text in ("aa", "large", "large", "aa"):
        ask(texts, made, text)
    assert made == ["aa", "large", "aa"]


def test_threads_that_ask_at_a_time_wait_for_one():
    texts, made = kept()
    begun, go = Event(), Event()

    def make() -> str:
        made.append("once")
        begun.set()
        assert go.wait(10)
        return "text"

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(texts.get, "key", make) for _ in range(8)]
        assert begun.wait(10)
        go.set()
        assert [each.result() for each in asked] == ["text"] * 8
    assert made == ["once"]


def test_what_could_not_be_made_is_tried_again():
    texts, made = kept()

    def fails() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        texts.get("key", fails)
    assert ask(texts, made, "key") == "key" == ask(texts, made, "key")
    assert made == ["key"]

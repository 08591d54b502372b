"""Counts and long values in messages: paths stay whole and quotations are closed."""

import json

import pytest

from tiercel.config_base import shown
from tiercel.message_text import brief, counted

PATH = "/training/data/vlm-r1/rec_jsons_processed/refcoco_train_with_more_to_say.json"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no more than this", "no more than this"),
        ("a text of many words is cut", "a text of many w..."),
        ('"a text of many words"', '"a text of many..."'),
        ("['a text', 'of many words']", "['a text', 'of ...'"),
        ("it can't be cut here at all", "it can't be cut ..."),
        (f"{PATH} is no file", f"{PATH}..."),
        (f'["a", "{PATH}", "b"]', f'["a", "{PATH}",...'),
        ("many words and then a/b", "many words and t..."),
    ],
)
def test_a_long_text(text, expected):
    assert brief(text, 19) == expected


def test_what_is_too_long_to_be_a_path_is_cut():
    assert brief("/" * 5000, 19) == "/" * 16 + "..."
    assert shown(PATH) == json.dumps(PATH)
    assert len(shown("a b " * 1000)) == 60


def test_one_has_no_plural():
    assert (counted(1, "row"), counted(0, "row"), counted(1024, "row")) == ("1 row", "0 rows", "1,024 rows")
    assert (counted(1, "process", "processes"), counted(2, "process", "processes")) == ("1 process", "2 processes")

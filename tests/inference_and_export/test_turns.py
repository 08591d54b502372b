"""The turns of a prompt that Python or the command line gives."""

import pytest

from tiercel.errors import DataError
from tiercel.inference_and_export.generate import as_turns


@pytest.mark.parametrize(
    "prompt",
    (
        "What?",
        "<image>What?",
        [{"role": "user", "content": "What?"}],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
    ),
)
def test_each_picture_has_its_mark(prompt):
    (turn,) = as_turns(prompt, 1)
    assert turn.role == "user" and turn.content == "<image>What?"


@pytest.mark.parametrize("text", ("[{'type': 'text', 'text': 'hi'}] is a list?", '[{"type":"text","text":"hi"}]'))
def test_a_text_is_asked_as_it_is(text):
    (turn,) = as_turns(text, 0)
    assert turn.content == text


@pytest.mark.parametrize(
    ("prompt", "pictures"),
    (
        ("<image>What?", 2),
        ("<image><image>What?", 1),
        ([{"role": "user"}], 0),
        ([{"role": "assistant", "content": "It is."}], 0),
        ([], 0),
    ),
)
def test_a_prompt_whose_pictures_do_not_fit_is_refused(prompt, pictures):
    with pytest.raises(DataError):
        as_turns(prompt, pictures)

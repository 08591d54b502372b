"""The turns of a prompt that Python or the command line gives."""

import pytest

from tiercel.data.marks import IMAGE_MARK, place_marks
from tiercel.errors import DataError
from tiercel.inference_and_export.generate import Generator, as_turns
from tiercel.runs.recipe import recipe_of_model
from tiercel.types import Message


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
    (turn,) = place_marks(as_turns(prompt), IMAGE_MARK, 1, "prompt", {})
    assert turn.role == "user" and turn.content == "<image>What?"


@pytest.mark.parametrize("text", ("[{'type': 'text', 'text': 'hi'}] is a list?", '[{"type":"text","text":"hi"}]'))
def test_a_text_is_asked_as_it_is(text):
    (turn,) = as_turns(text)
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
        place_marks(as_turns(prompt), IMAGE_MARK, pictures, "prompt", {})


def test_turns_after_the_last_question_are_left_out_with_a_word(caplog):
    as_turns([{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It"}])
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("template", "asked", "told"),
    ((None, "What?", 0), ("{prompt} Think {{first}}.", "What? Think {first}.", 0), ("{prompt} {hint}", "What?", 1)),
)
def test_the_question_is_worded_as_in_training(caplog, template, asked, told):
    recipe = recipe_of_model("model").with_values({"data.prompt": template})
    generator = Generator(recipe=recipe, policy=None, sampler=None)
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="What?"))
    worded = generator._as_in_training(messages)
    assert [turn.content for turn in worded] == ["Be brief.", asked]
    assert place_marks(worded, IMAGE_MARK, 1, "prompt", {})[1].content == f"<image>{asked}"  # before all of it, as rows
    assert len(caplog.messages) == told

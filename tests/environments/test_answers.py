"""Texts of the user's code cannot contain what is a mark or a special token to the model."""

from dataclasses import replace

import pytest

from tests.tiny_models import FAMILY_NAMES, make_row, noise_image
from tiercel.config.schema import Model
from tiercel.environments.answers import EnvironmentAnswer, answer_of, harmless, reset_fields, with_observation
from tiercel.environments.processes import EnvironmentFailure
from tiercel.models.families.loading import load_family
from tiercel.types import ImageRoots, ImageSource, Message


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_special_token_of_any_family_comes_out_of_a_text(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    tokenizer, written = family.tokenizer, harmless(family)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content.strip()}
    special |= set(family.placeholder_ids)
    assert special >= set(family.placeholder_ids) | set(family.checkpoint.end_token_ids)
    texts = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(special))]
    nested = [f"{text[:3]}{text}{text[3:]}" for text in texts]
    for text in [*texts, *nested, "<image>", "<video>", "<bbox>", str(family.image_marker), "".join(texts)]:
        safe = written(text)
        assert not special & set(tokenizer(safe, add_special_tokens=False)["input_ids"])
        assert safe.replace(" ", "") == text.replace(" ", "") and written(safe) == safe
        assert not any(mark in safe for mark in ("<image>", "<video>", "<bbox>"))


def test_other_texts_stay_as_they_are(tiny_checkpoints):
    written = harmless(load_family(Model(path=str(tiny_checkpoints["gemma3"]))))
    text = "a < b, <b>bold</b>\n\n\n\\n \u00e9 \U0001f600 [1, 2]"
    assert written(text) == text
    assert written("\ud800x") == "?x"


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"parts": 3, "is_done": False},
        {"parts": ["x"], "is_done": False},
        {"parts": [{"text": 3}], "is_done": False},
        {"parts": [{"image": "no base64!"}], "is_done": False},
        {"parts": [{}], "is_done": False},
        {"parts": [{"text": "x"}]},
    ],
)
def test_a_reply_of_another_form_is_a_failure(reply):
    with pytest.raises(EnvironmentFailure, match="something other than its answers"):
        answer_of(reply, str)


def test_parts_become_a_text_with_marks():
    parts = [{"text": "a <im"}, {"text": "age>"}, {"image": "eHk="}, {"text": "b"}]
    answer = answer_of({"parts": parts, "is_done": True}, lambda text: text.replace("<image>", "-"))
    assert answer == EnvironmentAnswer(content="a -<image>b", pictures=(ImageSource(data=b"xy"),), is_done=True)
    assert answer_of({"parts": None, "is_done": False}, str) is None


def test_an_observation_ends_the_last_user_turn():
    row = make_row("r", "<image>Which? <image>", 3)
    later = (Message(role="assistant", content="7"), Message(role="user", content="Sure?"))
    row = replace(row, messages=(row.messages[0], *later, Message(role="assistant", content="<image>")))
    new = ImageSource(data=b"new")
    seen = with_observation(row, EnvironmentAnswer(content=" Look <image>", pictures=(new,)))
    assert [message.content for message in seen.messages] == ["<image>Which? <image>", "7", "Sure? Look <image>"]
    assert seen.images == (*row.images[:2], new)


def test_reset_gets_the_files_of_pictures(tmp_path):
    noise_image(8, 8, 0).save(tmp_path / "a.png")
    images = (ImageSource(path="a.png"), ImageSource(data=b"x"))
    row = replace(make_row("r", "<image><image>?", 2), images=images, image_roots=ImageRoots(base=str(tmp_path)))
    fields = reset_fields(row)
    assert fields["images"] == [str(tmp_path.resolve() / "a.png"), None]
    assert (fields["id"], fields["prompt"], fields["answer"]) == ("r", "<image><image>?", row.answer)


def test_a_column_that_json_cannot_carry_is_named():
    row = replace(make_row("r", "Which?", 0), columns={"fine": 1, "odd": {1, 2}})
    with pytest.raises(EnvironmentFailure, match="row r, column odd: a set cannot be passed to your code as JSON"):
        reset_fields(row)

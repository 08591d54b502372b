"""Answers between turns, joined to what was sampled."""

from dataclasses import replace

import pytest
import torch

from tests.tiny_models import FAMILY_NAMES, noise_image
from tiercel.config.schema import Model
from tiercel.errors import DataError, ModelError
from tiercel.models.chat import encode_answer, require_joining, take_turn_end
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.models.rendering import render, token_ids
from tiercel.types import Message

SCHEMA = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
# Names the tools, writes calls and answers between tags, and pictures like the tiny checkpoints.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function') | map(attribute='name') | join }}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}MARKER{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %}</tool_response>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A thought is written only in the newest turn.
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)

# An answer is a part of the turn that asked for it, as Gemma 4 writes it, and the call ends with its own token.
INSIDE_THE_TURN = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    "{% else %}<|endoftext|>{% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}MARKER{% endif %}{% endfor %}"
    "{% if m.tool_calls %}{% if loop.last %}<|endoftext|>{% endif %}{% elif m.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)


def family_of(checkpoint, template: str | None = None) -> Family:
    family = load_family(Model(path=str(checkpoint)))
    if template is not None:
        family.checkpoint = replace(family.checkpoint, chat_template=template.replace("MARKER", family.image_marker))
    return family


@pytest.mark.parametrize("template", (None, WITH_TOOLS))
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_turns_one_after_the_other_are_the_whole_conversation(tiny_checkpoints, name, template):
    family = family_of(tiny_checkpoints[name], template)
    family.tools = (SCHEMA,)
    require_joining(family, "tool")
    require_joining(family, "user")
    picture = family.encode_image(noise_image(84, 56, 1))
    asked = Message(role="user", content="Where is the seven?")
    said = Message(role="assistant", content="Here.")
    answer = Message(role="user", content="See <image> this.")
    observation = encode_answer(family, [answer], [picture])
    start = token_ids(family, render(family, [asked], True), ())
    written = family.tokenizer("Here.")["input_ids"]
    whole = token_ids(family, render(family, [asked, said, answer], True), [picture.plan])
    assert start + written + observation.token_ids_L.tolist() == whole
    assert int(family.is_placeholder(observation.token_ids_L).sum()) == family.feature_count(picture.plan)
    assert observation.images == (picture,)


def test_an_answer_of_a_tool_follows_the_call_that_it_belongs_to(tiny_checkpoints):
    family = family_of(tiny_checkpoints["qwen3_vl"], WITH_TOOLS)
    answers = [Message(role="tool", content=text, tool=text) for text in ("one", "two")]
    text = family.tokenizer.decode(encode_answer(family, answers, ()).token_ids_L)
    assert text == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>one</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>two</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_may_be_a_part_of_the_turn_that_asked_for_it(tiny_checkpoints):
    family = family_of(tiny_checkpoints["qwen3_vl"], INSIDE_THE_TURN)
    ends = family.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    family.checkpoint = replace(family.checkpoint, end_token_ids=tuple(ends))
    require_joining(family, "tool", has_pictures=True)
    require_joining(family, "user")
    observation = encode_answer(family, [Message(role="tool", content="seven", tool="look")], ())
    assert family.tokenizer.decode(observation.token_ids_L) == "<|endoftext|>seven"
    observation = encode_answer(family, [Message(role="user", content="Why?")], ())
    text = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert family.tokenizer.decode(observation.token_ids_L) == text


def test_the_template_gets_the_tools(tiny_checkpoints):
    family = family_of(tiny_checkpoints["qwen3_vl"], WITH_TOOLS)
    asked = [Message(role="user", content="Where?")]
    assert "look" not in render(family, asked, True)
    family.tools = (SCHEMA,)
    assert render(family, asked, True).startswith("<|im_start|>system\nlook<|im_end|>")


def test_a_template_that_changes_earlier_turns_is_refused(tiny_checkpoints):
    family = family_of(tiny_checkpoints["qwen3_vl"], FORGETS_THOUGHTS)
    with pytest.raises(ModelError, match=r"differently when another follows.*'I look.*have '<think></think>I look"):
        require_joining(family, "user")


def test_a_picture_that_the_template_does_not_show_is_refused(tiny_checkpoints):
    family = family_of(tiny_checkpoints["qwen3_vl"], WITH_TOOLS.replace("MARKER", ""))
    picture = family.encode_image(noise_image(84, 56, 1))
    with pytest.raises(DataError, match="0 places for 1 images"):
        encode_answer(family, [Message(role="tool", content="<image>", tool="look")], [picture])
    require_joining(family, "tool")
    with pytest.raises(ModelError, match=r"cannot write what comes back.*0 places for 1 images.*set data\.template"):
        require_joining(family, "tool", has_pictures=True)


def test_a_template_that_prints_an_answer_as_a_list_is_refused(tiny_checkpoints):
    prints = WITH_TOOLS.replace(
        "{% for part in m.content %}", "{% if m.role == 'tool' %}{{ m.content }}{% endif %}{% for part in m.content %}"
    )
    family = family_of(tiny_checkpoints["qwen3_vl"], prints)
    assert prints != WITH_TOOLS
    with pytest.raises(ModelError, match=r"cannot write what comes back to the policy: .* as a list of parts"):
        require_joining(family, "tool")


def test_without_an_end_of_its_own_a_turn_ends_where_the_next_begins(tiny_checkpoints):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    family = family_of(tiny_checkpoints["qwen3_vl"], template)
    take_turn_end(family)
    answer = [Message(role="user", content="seven")]
    with pytest.raises(ModelError, match="never ends a turn"):
        require_joining(family, "user")
    start = family.tokenizer.convert_tokens_to_ids("<|im_start|>")
    family.checkpoint = replace(family.checkpoint, end_token_ids=(*family.checkpoint.end_token_ids, start))
    take_turn_end(family)
    require_joining(family, "user")
    ids = encode_answer(family, answer, ()).token_ids_L
    assert ids[0] == start and family.tokenizer.decode(ids) == "<|im_start|>user seven<|im_start|>assistant "


def test_a_template_that_numbers_pictures_counts_those_before(tiny_checkpoints):
    numbers = (
        "{% set seen = namespace(pictures=0) %}{% for m in messages %}<|im_start|>{{ m.role }} "
        "{% for part in m.content %}{% if part.type == 'image' %}{% set seen.pictures = seen.pictures + 1 %}"
        "Picture {{ seen.pictures }}: MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    family = family_of(tiny_checkpoints["qwen3_vl"], numbers)
    picture = family.encode_image(noise_image(84, 56, 1))
    for shown in (0, 2):
        answer = encode_answer(family, [Message(role="user", content="<image>")], [picture], shown)
        assert f"Picture {shown + 1}: " in family.tokenizer.decode(answer.token_ids_L)


def test_an_answer_without_pictures_has_none(tiny_checkpoints):
    family = family_of(tiny_checkpoints["gemma3"])
    observation = encode_answer(family, [Message(role="user", content="No.")], ())
    assert observation.images == () and observation.token_ids_L.dtype == torch.int64

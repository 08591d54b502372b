"""Conversations to token ids: what is scored, what is refused, where boxes and images are placed."""

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.generic_models import GENERIC, save_generic_checkpoint
from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, noise_image, tiny_policy
from tiercel.config.schema import Model
from tiercel.errors import DataError, ModelError
from tiercel.models.chat import require_joining, take_turn_end
from tiercel.models.families.base import Family
from tiercel.models.families.image_transforms import picture_image
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import (
    completion_positions,
    conversation_length,
    encode_conversation,
    encode_prompt,
    prompt_length,
)
from tiercel.models.rendering import render, token_ids
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.examples import conversation_item
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.types import EncodedConversation, EncodedImage, ImageSource, Message, PixelLimits, Row

HEAD = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "ovis2": "<image>\n",
    "internvl": "<IMG_CONTEXT>\n",
    "llava_onevision": "<image>\n",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
}


@pytest.fixture(scope="module")
def families(tiny_checkpoints) -> dict[str, Family]:
    return {name: load_family(Model(path=str(tiny_checkpoints[name]))) for name in FAMILY_NAMES}


@pytest.fixture
def family(families) -> Family:
    return families["qwen2_5_vl"]


def row_of(*turns: tuple[str, str], images: int = 0, **keys) -> Row:
    return Row(
        id="row-1",
        messages=tuple(Message(role=role, content=content) for role, content in turns),
        images=tuple(ImageSource(path=f"{i}.png") for i in range(images)),
        columns={},
        file="rows.jsonl",
        line=1,
        **keys,
    )


def conversation_of(
    family: Family, row: Row, images=(), system: str | None = None, limit: int = 400
) -> EncodedConversation:
    return encode_conversation(family, row, 0, images, system=system, max_prompt_tokens=limit)


def pieces(family: Family, conversation: EncodedConversation) -> list[tuple[bool, str]]:
    """What follows the prompt, as runs of scored and unscored text."""
    pairs = zip(conversation.is_scored_L.tolist(), conversation.token_ids_L.tolist(), strict=True)
    return [
        (scored, family.tokenizer.decode([token for _, token in run]))
        for scored, run in groupby(pairs, key=lambda pair: pair[0])
    ]


TWO_TURNS = (
    ("user", "Where is the seven?"),
    ("assistant", "[1, 2]"),
    ("user", "Where?"),
    ("assistant", "12"),
)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_assistant_turn_is_scored_with_its_end(families, name):
    family = families[name]
    conversation = conversation_of(family, row_of(*TWO_TURNS))
    assert conversation.prompt.text == "<|im_start|>user\nWhere is the seven?<|im_end|>\n<|im_start|>assistant\n"
    assert family.tokenizer.decode(conversation.prompt.token_ids_P.tolist()) == conversation.prompt.text
    assert pieces(family, conversation) == [
        (True, "[1, 2]<|im_end|>"),
        (False, "\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "12<|im_end|>"),
    ]
    whole = torch.cat([conversation.prompt.positions_DP, conversation.positions_DL], dim=1)
    assert whole.tolist() == [list(range(whole.shape[1]))] * family.position_dimensions


def test_turns_after_the_last_answer_are_not_carried(family):
    conversation = conversation_of(family, row_of(*TWO_TURNS, ("user", "Where is the seven?")))
    assert pieces(family, conversation)[-1] == (True, "12<|im_end|>")


def test_the_turn_has_the_tokens_that_sampling_would_have_met(family):
    """Tokenised apart: a turn's first token does not merge with the header before it."""
    row = row_of(("user", "?"), ("assistant", "12 seven"))
    conversation = conversation_of(family, row)
    own = family.tokenizer("12 seven", add_special_tokens=False)["input_ids"]
    assert conversation.token_ids_L.tolist() == [*own, family.tokenizer.eos_token_id]
    assert torch.equal(
        conversation.prompt.token_ids_P,
        encode_prompt(family, row, 0, [], system=None, max_prompt_tokens=99).token_ids_P,
    )


def test_an_end_token_in_a_turns_text_does_not_end_it(family):
    conversation = conversation_of(family, row_of(("user", "?"), ("assistant", "1<|endoftext|>2")))
    assert pieces(family, conversation) == [(True, "1<|endoftext|>2<|im_end|>")]


FOREIGN_MARKS = (
    *("<img>a.png</img>", "<|image_1|>", "<img></img>", "(image)[image-1.png]", "<IMG_CONTEXT>", "<start_of_image>"),
    *("<|media_placeholder|>", "<image_token>"),
)


@pytest.mark.parametrize("mark", FOREIGN_MARKS)
def test_a_mark_of_another_framework_is_not_read_as_text(family, mark):
    with pytest.raises(DataError, match=f"contains {re.escape(mark)}, a mark of a picture in another framework"):
        prompt_length(family, row_of(("user", f"{mark} What is it?")), (), None)
    answered = row_of(("user", "Write markup."), ("assistant", f"Here: {mark}"))
    assert conversation_length(family, answered, (), None) > 0
    for plain in (
        "<img src='a.png'>",
        "<Image>",
        "&lt;image&gt;",
        "<imagery>",
        "image 1",
        "an <image/> tag",
        "(image)",
        "[image]",
    ):
        assert prompt_length(family, row_of(("user", plain)), (), None) > 0


VIDEO_MARKS = ("<|video_1|>", "<VideoHere>", "<|video|>", "<vid>a.mp4</vid>")


@pytest.mark.parametrize("mark", VIDEO_MARKS)
def test_a_mark_of_a_video_in_another_framework_is_not_read_as_text(family, mark):
    with pytest.raises(DataError, match=f"contains {re.escape(mark)}, a mark of a video in another framework"):
        prompt_length(family, row_of(("user", f"{mark} What falls?")), (), None)
    for plain in ("<video src='a.mp4'>", "<Video>", "<video1>", "video 1", "<videos>"):
        assert prompt_length(family, row_of(("user", plain)), (), None) > 0


RENDERED = (  # rows of autotrain-advanced 753, and as the templates of other models write a question
    *("<|im_start|>user\nWhere?", "<s>[INST] Where? [/INST]", "[INST] Where? [/INST]", "<start_of_turn>user\nWhere?"),
    *("<|begin_of_text|>Where?", "<|start_header_id|>user<|end_header_id|>\n\nWhere?", "<|user|>\nWhere?"),
    *("USER: Where is the seven? ASSISTANT:", "<image>[INST] Where? [/INST]", "USER: <image>\nWhere? ASSISTANT:"),
)


@pytest.mark.parametrize("content", RENDERED)
def test_a_question_that_was_rendered_before_is_not_rendered_again(family, content):
    with pytest.raises(DataError, match="give only what is said in the turn") as error:
        prompt_length(family, row_of(("user", content)), (), None)
    assert error.value.field == "messages"


def test_what_the_template_writes_around_turns_may_stand_nowhere_in_a_row(families):
    for family in families.values():
        assert "<|im_start|>" in family.turn_tokens
        for role in ("system", "user"):
            row = row_of((role, "the <|im_start|> seven"), ("user", "?"), ("assistant", "7"))
            with pytest.raises(DataError, match=rf"the {role} turn contains <\|im_start\|>"):
                conversation_of(family, row)
    plain = row_of(("user", "USER: is the ASSISTANT: seven"), ("assistant", "<think>\n7</think>7"))
    assert conversation_of(families["qwen2_5_vl"], plain)


@pytest.mark.parametrize("end", ("</s>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>\n", "<|end|>", "<eos>"))
def test_the_end_of_another_models_turn_is_not_learnt_as_text(family, end):
    row = row_of(("user", "?"), ("assistant", f"7{end}"))
    for call in (lambda: conversation_of(family, row), lambda: conversation_length(family, row, [], None)):
        with pytest.raises(DataError, match=f"the assistant turn ends with {re.escape(end.strip())}"):
            call()
    assert conversation_of(family, row_of(("user", "?"), ("assistant", f"write {end.strip()} 7")))


def test_html_may_end_a_struck_text(family):
    for answer in ("<s>6</s>7 <s>8</s>", "<p>6 <s class='x'>7</s>", "<S>6</s>", '<s xml:lang="en">seven</s>'):
        assert conversation_of(family, row_of(("user", "?"), ("assistant", answer)))


def test_a_question_about_marks_of_turns_is_read(family):
    for question in ("Which is the end token? A. <eos> B. <end_of_turn>", "[INST] is the marker of Llama 2. Why?"):
        assert prompt_length(family, row_of(("user", question)), (), None) > 0


def test_a_familys_own_token_of_a_picture_is_not_called_another_frameworks(families, family):
    with pytest.raises(DataError, match="the rendered text has 1 places for 0 images"):
        prompt_length(family, row_of(("user", "<|image_pad|> What is it?")), (), None)
    with pytest.raises(DataError, match=r"contains <\|image_pad\|>, a mark of a picture in another framework"):
        prompt_length(families["internvl"], row_of(("user", "<|image_pad|> What is it?")), (), None)


def test_no_assistant_turn_is_refused(family):
    with pytest.raises(DataError, match="there is no assistant turn to train on"):
        conversation_of(family, row_of(("user", "Where?")))


def test_no_user_turn_is_refused(family):
    with pytest.raises(DataError, match="there is no user turn to sample after"):
        encode_prompt(family, row_of(("assistant", "12")), 0, [], system=None, max_prompt_tokens=99)


def test_a_long_conversation_is_refused_whole(family):
    row = row_of(*TWO_TURNS)
    tokens = conversation_of(family, row)
    length = len(tokens.prompt.token_ids_P) + len(tokens.token_ids_L)
    conversation_of(family, row, limit=length)
    with pytest.raises(DataError, match=f"has {length} tokens, more than data.max_prompt_tokens = {length - 1}"):
        conversation_of(family, row, limit=length - 1)


def with_template(family: Family, tmp_path: Path, template: str) -> Family:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    return load_family(Model(path=family.checkpoint.path), str(file))


TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'][0]['text'] }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REWRITING = {
    "only the last answer is shown in full": (
        "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
        "<|im_start|>assistant\n<|im_end|>\n{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    ),
    "the turns are counted in the header": (
        "{{ messages | length }} turns\n{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT
    ),
    "the generation prompt is not how an answer begins": (
        "{% for message in messages %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nThink.{% endif %}"
    ),
}


@pytest.mark.parametrize("kind", REWRITING)
def test_a_template_that_rewrites_earlier_turns_is_refused(family, tmp_path, kind):
    changed = with_template(family, tmp_path, REWRITING[kind])
    with pytest.raises(DataError, match=r"chat template changes earlier turns.*data\.template") as error:
        conversation_of(changed, row_of(*TWO_TURNS))
    assert error.value.field == "messages"


@pytest.mark.parametrize("thought", ("<|channel>thought\n<channel|>", "<think>\n\n</think>\n\n"))
def test_an_empty_thought_of_the_generation_prompt_stands_before_the_last_answer(family, tmp_path, thought):
    """As in the templates of Gemma 4 26B and 31B."""
    turns = "{% for message in messages %}" + TURN + "{% endfor %}"
    plain = with_template(family, tmp_path, turns + PROMPT)
    changed = with_template(family, tmp_path, turns + PROMPT.replace("{% endif %}", thought + "{% endif %}"))
    row = row_of(*TWO_TURNS)
    found, without = conversation_of(changed, row), conversation_of(plain, row)
    text = changed.tokenizer.decode(found.prompt.token_ids_P.tolist() + found.token_ids_L.tolist())
    assert text.count(thought) == 1 and text.rindex("assistant\n" + thought) == text.rindex("assistant\n")
    scored, expected = (each.token_ids_L[each.is_scored_L].tolist() for each in (found, without))
    assert scored == expected
    assert conversation_length(changed, row, (), None) == len(found.prompt.token_ids_P) + len(found.token_ids_L)


EACH = "{% for message in messages %}", "{% endfor %}" + PROMPT
LOSSY = {
    "no system": EACH[0] + "{% if message['role'] != 'system' %}" + TURN + "{% endif %}" + EACH[1],
    "no thought": EACH[0] + TURN.replace("['text']", "['text'].split('</think>')[-1]") + EACH[1],
    "first line": EACH[0] + TURN.replace("['text']", "['text'].split('\n')[0]") + EACH[1],
    "parts": EACH[0] + TURN.replace("[0]['text']", "") + EACH[1],
}


@pytest.mark.parametrize(
    ("kind", "turns", "role"),
    [
        ("no system", (("system", "Be brief."), ("user", "?"), ("assistant", "7")), "system"),
        ("no thought", (("user", "?"), ("assistant", "<think>the seven</think>7")), "assistant"),
        ("no thought", (("user", "Read </think> this"), ("assistant", "7")), "user"),
        ("first line", (("user", "?"), ("assistant", "the\nseven")), "assistant"),
        ("parts", (("user", "?"), ("assistant", "7")), "list of parts"),
    ],
)
def test_a_template_that_leaves_out_text_is_refused(family, tmp_path, kind, turns, role):
    changed, row = with_template(family, tmp_path, LOSSY[kind]), row_of(*turns)
    calls = [lambda: conversation_of(changed, row), lambda: conversation_length(changed, row, [], None)]
    if role != "assistant":
        calls.append(lambda: encode_prompt(changed, row, 0, [], system=None, max_prompt_tokens=99))
        calls.append(lambda: prompt_length(changed, row, [], None))
    for call in calls:
        with pytest.raises(DataError, match=role) as error:
            call()
        assert error.value.field == "messages" and "data.template" in str(error.value)


def test_the_recipes_system_message_must_be_in_the_text(family, tmp_path):
    changed = with_template(family, tmp_path, LOSSY["no system"])
    with pytest.raises(DataError, match=r"role system: 'Be brief\.';"):
        encode_prompt(changed, row_of(("user", "?")), 0, [], system="Be brief.", max_prompt_tokens=99)


def test_a_turn_that_is_trimmed_and_thoughts_of_earlier_answers_are_no_loss(family, tmp_path):
    trims = with_template(family, tmp_path, EACH[0] + TURN.replace("['text']", "['text'] | trim") + EACH[1])
    assert conversation_of(trims, row_of(("user", " ? "), ("assistant", "\n7\n")))
    printed = row_of(("user", "{'type': 'text'"), ("assistant", "7"))
    assert conversation_of(family, printed)
    forgets = with_template(family, tmp_path, LOSSY["no thought"])
    asked = row_of(("user", "?"), ("assistant", "<think>the seven</think>7"), ("user", "12?"))
    assert "the seven" not in encode_prompt(forgets, asked, 0, [], system=None, max_prompt_tokens=99).text
    unlearnt = replace(asked, messages=(asked.messages[0], replace(asked.messages[1], is_trained=False)))
    later = (Message(role="user", content="12?"), Message(role="assistant", content="12"))
    assert conversation_of(forgets, replace(unlearnt, messages=(*unlearnt.messages, *later)))


def test_a_template_that_refuses_is_quoted(family, tmp_path):
    changed = with_template(family, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="refuses this conversation: roles must alternate"):
        encode_prompt(changed, row_of(("user", "?")), 0, [], system=None, max_prompt_tokens=99)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% include 'a' %}", "{{ range(10 ** 9) }}", "{{ messages.a.b }}"])
def test_a_template_that_fails_rejects_the_row(family, tmp_path, template):
    changed = with_template(family, tmp_path, template)
    with pytest.raises(DataError, match="the chat template refuses this conversation"):
        encode_prompt(changed, row_of(("user", "?")), 0, [], system=None, max_prompt_tokens=99)


def test_a_template_without_room_for_images_is_refused(family, tmp_path):
    changed = with_template(family, tmp_path, "{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT)
    image = family.encode_image(noise_image(56, 56, 0))
    row = row_of(("user", "Where?<image>"), images=1)
    with pytest.raises(DataError, match="0 places for 1 images and videos"):
        encode_prompt(changed, row, 0, [image], system=None, max_prompt_tokens=99)


def test_the_recipes_system_message_opens_rows_that_have_none(family):
    row = row_of(("user", "?"))
    own = row_of(("system", "the seven"), ("user", "?"))
    given = encode_prompt(family, row, 0, [], system="is", max_prompt_tokens=99)
    assert given.text == "<|im_start|>system\nis<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert "system\nthe seven<" in encode_prompt(family, own, 0, [], system="is", max_prompt_tokens=99).text
    assert "system" not in encode_prompt(family, row, 0, [], system=None, max_prompt_tokens=99).text
    assert given.row is row  # the record of a run shows the row as it was written
    conversation = conversation_of(family, row_of(("user", "?"), ("assistant", "12")), system="is")
    assert conversation.prompt.text == given.text


SIZES = ((84, 56), (112, 112))  # the second picture is reduced to 56 x 56 if the family does so
BOXES = ((21.0, 14.0, 42.0, 28.0), (0.0, 28.0, 112.0, 56.0), (0.0, 0.0, 84.0, 56.0))


@pytest.mark.parametrize(
    ("name", "space", "written"),
    [
        ("qwen2_vl", "thousandths", ("[250, 250, 500, 500]", "[0, 250, 1000, 500]", "[0, 0, 1000, 1000]")),
        ("qwen2_5_vl", "resized_pixels", ("[21, 14, 42, 28]", "[0, 14, 56, 28]", "[0, 0, 84, 56]")),
        (
            "ovis2",
            "unit",
            ("[0.250, 0.250, 0.500, 0.500]", "[0.000, 0.250, 1.000, 0.500]", "[0.000, 0.000, 1.000, 1.000]"),
        ),
    ],
)
def test_boxes_are_written_in_the_familys_space(tiny_checkpoints, name, space, written):
    limits = {"max_pixels": 84 * 56} if name.startswith("qwen") else {}
    family = load_family(Model(path=str(tiny_checkpoints[name]), **limits))
    assert family.coordinate_space == space
    images = [family.encode_image(noise_image(*size, seed=0)) for size in SIZES]
    row = row_of(
        ("user", "<image><image>Where is <bbox>?"),
        ("assistant", "<bbox> is the seven, <bbox>"),
        images=2,
        boxes=BOXES,
        box_images=(0, 1, 0),
    )
    conversation = conversation_of(family, row, images)
    assert conversation.prompt.text.endswith(f"Where is {written[0]}?<|im_end|>\n<|im_start|>assistant\n")
    assert pieces(family, conversation) == [(True, f"{written[1]} is the seven, {written[2]}<|im_end|>")]
    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
    assert prompt.text == conversation.prompt.text
    plans = [image.plan for image in images]
    assert prompt_length(family, row, plans, None) == len(prompt.token_ids_P)


@pytest.mark.parametrize(
    ("box", "written"),
    [
        ((-0.4, 0.0, 84.6, 56.9), "[0, 0, 1000, 1000]"),  # rounding by whoever made the row
        ((42.0, 14.0), "[500, 250]"),
        ((-14.0, 20.0, 42.0, 28.0), None),
        ((1.0, 64.0, 84.0, 200.0), None),
        ((0.1, 0.2, 0.9, 0.8), None),
    ],
)
def test_a_box_beyond_its_picture_is_never_written(tiny_checkpoints, box, written):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    images = [family.encode_image(noise_image(84, 56, seed=0))]
    row = row_of(("user", "<image>Where?"), ("assistant", "<bbox>"), images=1, boxes=(box,), box_images=(0,))
    if written is None:
        with pytest.raises(DataError, match="its picture of 84 x 56 pixels") as caught:
            conversation_of(family, row, images)
        assert caught.value.field == "boxes"
    else:
        assert pieces(family, conversation_of(family, row, images)) == [(True, f"{written}<|im_end|>")]


ORIGINALS = [noise_image(*size, seed=seed) for seed, size in enumerate(((84, 56), (56, 120)))]


def pictures(family: Family) -> list[EncodedImage]:
    return [family.encode_image(picture) for picture in ORIGINALS]


LATER = (
    ("user", "Where?<image>"),
    ("assistant", "12"),
    ("user", "<image>is the seven?"),
    ("assistant", "[1, 2]"),
)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_images_in_later_turns(families, name):
    family = families[name]
    images = pictures(family)
    row = row_of(*LATER, images=2)
    conversation = conversation_of(family, row, images)
    first, second = (family.feature_count(image.plan) for image in images)
    assert conversation.prompt.text == (f"<|im_start|>user\nWhere?{HEAD[name]}<|im_end|>\n<|im_start|>assistant\n")
    assert int(family.is_placeholder(conversation.prompt.token_ids_P).sum()) == first
    in_rest = family.is_placeholder(conversation.token_ids_L)
    assert int(in_rest.sum()) == second
    assert not bool((in_rest & conversation.is_scored_L).any())
    assert conversation.prompt.images == tuple(images)
    assert [text for scored, text in pieces(family, conversation) if scored] == ["12<|im_end|>", "[1, 2]<|im_end|>"]

    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
    assert prompt.images == tuple(images)  # everything up to the last user turn
    ids = torch.cat([conversation.prompt.token_ids_P, conversation.token_ids_L])
    positions = torch.cat([conversation.prompt.positions_DP, conversation.positions_DL], dim=1)
    assert torch.equal(ids[: len(prompt.token_ids_P)], prompt.token_ids_P)
    assert torch.equal(positions[:, : len(prompt.token_ids_P)], prompt.positions_DP)

    earlier = encode_prompt(
        family, replace(row, messages=row.messages[:2]), 0, images, system=None, max_prompt_tokens=400
    )
    assert earlier.images == tuple(images[:1])
    assert earlier.text == conversation.prompt.text


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logprobs_with_images_in_later_turns_equal_a_plain_forward(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    family = policy.family
    conversation = conversation_of(family, row_of(*LATER, images=2), pictures(family))
    packed = pack([conversation_item(conversation)])
    ids = torch.cat([conversation.prompt.token_ids_P, conversation.token_ids_L])
    with torch.no_grad():
        features = VisionStore(policy, 0).features(packed.images)
        found = PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N
        logits = policy.model(**huggingface_inputs(family, conversation.prompt, ids, ORIGINALS)).logits[0]
    logits[:, list(family.placeholder_ids)] = -torch.inf
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    expected = logprobs[len(conversation.prompt.token_ids_P) - 1 :][conversation.is_scored_L]
    assert len(expected) == int(conversation.is_scored_L.sum()) > 6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_lengths_are_known_from_the_headers(families, name):
    family = families[name]
    images = pictures(family)
    plans = [family.plan_image(size) for size in ((84, 56), (56, 120))]
    row = row_of(*LATER, images=2)
    prompt = encode_prompt(family, row, 0, images, system="is", max_prompt_tokens=400)
    assert prompt_length(family, row, plans, "is") == len(prompt.token_ids_P)
    conversation = conversation_of(family, row, images, system="is")
    kept = len(conversation.prompt.token_ids_P) + len(conversation.token_ids_L)
    # the template's line break after the last turn predicts nothing and is left out
    assert conversation_length(family, row, plans, "is") == kept


@pytest.mark.parametrize("images", (0, 2))
def test_more_or_fewer_images_than_places_are_refused(family, images):
    row = row_of(("user", "<image>Where?"), ("assistant", "12"), images=images)
    with pytest.raises(DataError, match="image"):
        conversation_of(family, row, pictures(family)[:images])


def test_a_prompt_of_images_alone(family):
    image = family.encode_image(noise_image(56, 56, 0))
    prompt = encode_prompt(family, row_of(("user", "<image>"), images=1), 0, [image], system=None, max_prompt_tokens=99)
    assert int(family.is_placeholder(prompt.token_ids_P).sum()) == image.plan.token_count == 4


def test_render_puts_a_marker_where_the_image_goes(family):
    text = render(family, (Message(role="user", content="a<image>b<image>"),), add_generation_prompt=False)
    mark = HEAD["qwen2_5_vl"]
    assert text == f"<|im_start|>user\na{mark}b{mark}<|im_end|>\n"


def test_each_marker_becomes_its_own_images_tokens(family):
    plans = [family.plan_image(size) for size in ((84, 56), (56, 56))]
    pad = family.checkpoint.config.image_token_id
    ids = token_ids(family, "1<|image_pad|>2<|image_pad|>", plans)
    one, two = family.tokenizer.convert_tokens_to_ids(["1", "2"])
    assert ids == [one, *[pad] * 6, two, *[pad] * 4]


def test_positions_after_an_image_go_on_from_its_longer_side():
    positions = torch.tensor([[0, 1, 1, 1, 2], [0, 1, 1, 1, 5], [0, 1, 2, 3, 4]])
    assert completion_positions(positions, 3).tolist() == [[6, 7, 8]] * 3


def masked_row(*is_trained, images=0):
    """Turns in pairs; whether each answer is learnt."""
    messages = []
    for number, trained in enumerate(is_trained):
        messages.append(Message(role="user", content="<image>Where?" if number < images else "Where?"))
        messages.append(Message(role="assistant", content=str(number), is_trained=trained))
    row = row_of(("user", "?"), images=images)
    return replace(row, messages=tuple(messages))


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize(
    ("is_trained", "learnt"), [((True, False, True), "0 2"), ((False, True, False), "1"), ((False, True), "1")]
)
def test_turns_left_out_of_the_loss_are_read_and_not_learnt(families, name, is_trained, learnt):
    family = families[name]
    conversation = conversation_of(family, masked_row(*is_trained), [])
    scored = [text for is_scored, text in pieces(family, conversation) if is_scored]
    assert scored == [f"{answer}<|im_end|>" for answer in learnt.split()]
    whole = family.tokenizer.decode(torch.cat([conversation.prompt.token_ids_P, conversation.token_ids_L]))
    last = int(learnt.split()[-1])
    assert whole.endswith(f"{last}<|im_end|>") and whole.count("<|im_start|>assistant") == last + 1
    kept = len(conversation.prompt.token_ids_P) + len(conversation.token_ids_L)
    assert conversation_length(family, masked_row(*is_trained), [], None) == kept


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pictures_after_the_last_learnt_turn_are_left_out(families, name):
    family = families[name]
    row = masked_row(True, False, images=2)
    conversation = conversation_of(family, row, pictures(family))
    assert len(conversation.prompt.images) == 1
    ids = torch.cat([conversation.prompt.token_ids_P, conversation.token_ids_L])
    assert int(family.is_placeholder(ids).sum()) == family.feature_count(conversation.prompt.images[0].plan)
    plans = [family.plan_image(size) for size in ((84, 56), (56, 120))]
    assert conversation_length(family, row, plans, None) == len(ids)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_one_placeholder_for_each_picture(families, name):
    family = families[name]
    prompt = encode_prompt(
        family, row_of(("user", "a<image><image>b"), images=2), 0, pictures(family), system=None, max_prompt_tokens=400
    )
    ids = family.unexpanded_token_ids(prompt.token_ids_P, [image.plan for image in prompt.images])
    marker = family.tokenizer.convert_tokens_to_ids(family.image_marker)
    one = marker if name == "gemma3" else family.placeholder_ids[0]
    assert ids.count(one) == 2 and not set(family.placeholder_ids[1:]) & set(ids)
    if one == marker:  # the template's own text, before images are filled in
        assert ids == family.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


LLAVA = (  # as LLaVA-1.5 is published, without the list of parts
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{{ message['content'] }}"
    "{% if message['role'] == 'user' %} {% elif ends %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def sentence_pieces(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer in which every text begins with a space: as LLaVA-1.5's, also behind special tokens, or only the
    first."""
    words = ("USER", "ASSISTANT", "A", "cat", "What", "now", "It", "sits")
    vocabulary = {
        symbol: number for number, symbol in enumerate(("\n", "\u2581", ":", ".", "?", *sorted(set("".join(words)))))
    }
    merges = []
    for word in words:
        for length in range(2, len(word) + 1):
            merges.append((word[: length - 1], word[length - 1]))
        merges.append(("\u2581", word))
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    if kind == "every":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


@pytest.mark.parametrize("kind", ("every", "first"))
@pytest.mark.parametrize("ends", (True, False))
def test_a_turn_behind_text_gets_no_second_space(tmp_path, kind, ends):
    family = load_family(Model(path=str(save_generic_checkpoint(GENERIC["llama"], tmp_path / "it"))))
    family.tokenizer = tokenizer = sentence_pieces(kind)
    template = LLAVA.replace("elif ends", "else" if ends else "elif false")
    end = tokenizer.eos_token_id
    family.checkpoint = replace(family.checkpoint, tokenizer=tokenizer, chat_template=template, end_token_ids=(end,))
    take_turn_end(family)
    turns = (("user", "What now?"), ("assistant", "A cat."))
    more = (("user", "What?"), ("assistant", "It sits.")) if ends else ()
    conversation = conversation_of(family, row_of(*turns, *more))
    text = "USER: What now? ASSISTANT: A cat." + ("</s>USER: What? ASSISTANT: It sits.</s>" if ends else "</s>")
    ids = [*conversation.prompt.token_ids_P.tolist(), *conversation.token_ids_L.tolist()]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[conversation.prompt.token_ids_P.numel() :][:2] == [
        "\u2581A",
        "\u2581cat",
    ]
    if ends:
        require_joining(family, "user")


def test_a_rows_own_pixel_limits_lie_within_the_recipes(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen3_vl"]), min_pixels=784, max_pixels=112 * 112))
    assert family.plan_image((112, 112)).processed_size == (112, 112)
    limits = PixelLimits(most=56 * 56)
    assert family.plan_image((112, 112), limits).processed_size == (56, 56)
    image = family.encode_image(noise_image(112, 112, 0), limits)
    assert image.plan.processed_size == (56, 56)
    assert family.encode_image(picture_image(image.views[0])).sha256 == image.sha256  # nothing left for an engine to do
    with pytest.raises(DataError, match=r"must be between model\.min_pixels 784 and model.max_pixels 12544") as error:
        family.plan_image((112, 112), PixelLimits(most=200_000))
    assert error.value.field == "max_pixels"


@pytest.mark.parametrize("name", ("ovis2", "internvl", "llava_onevision", "gemma3", "gemma4"))
def test_families_of_other_sizes_have_no_pixel_limits(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    with pytest.raises(DataError, match=f"{family.sizes}; remove the row's max_pixels"):
        family.plan_image((100, 100), PixelLimits(most=3136))
    with pytest.raises(ModelError, match=f"model.min_pixels: is set, but {name} {family.sizes}"):
        load_family(Model(path=str(tiny_checkpoints[name]), min_pixels=3136))


def test_a_picture_of_which_nothing_is_left_is_refused(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["llava_onevision"])))
    with pytest.raises(DataError, match="too narrow"):
        family.plan_image((2000, 1))

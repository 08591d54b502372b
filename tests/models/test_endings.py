"""The end of a turn if it is not the tokenizer's own end token: base models, and any template of the user."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from tests.models.test_prompts import TWO_TURNS, conversation_of, pieces, row_of
from tests.tiny_models import tiny_policy
from tiercel.config.schema import Model
from tiercel.errors import DataError, ModelError
from tiercel.models.chat import encode_answer, turn_end_line
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import conversation_length, encode_prompt, prompt_length
from tiercel.models.weights.saving import save_model
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.token_sampling import TokenDraw
from tiercel.rollout.vllm.requests import sampling_fields
from tiercel.types import Message

CHAT = "<|im_end|>", "<|endoftext|>"  # of the template, of the base model's tokenizer


@pytest.fixture
def base(tiny_checkpoints, tmp_path) -> Path:
    """A base model: its tokenizer's end token is not the one of chats."""
    folder = Path(shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "base"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(found | {"eos_token": CHAT[1]}))
    (folder / "generation_config.json").unlink()
    return folder


def family_with(folder: Path, end: str | None) -> Family:
    """Load a checkpoint with its own template, or one that writes another text after a turn."""
    if end is None:
        return load_family(Model(path=str(folder)))
    own = (folder / "chat_template.jinja").read_text()
    assert CHAT[0] in own
    file = folder.parent / "other.jinja"
    # only after the assistant's turns, so that prompts do not contain it
    file.write_text(own.replace(CHAT[0], f"{{{{ '{end}' if message['role'] == 'assistant' else '{CHAT[0]}' }}}}"))
    return load_family(Model(path=str(folder)), str(file))


def test_a_base_models_turns_end_as_the_template_ends_them(base):
    family = family_with(base, None)
    assert family.tokenizer.eos_token == CHAT[1]
    assert family.checkpoint.end_token_ids == tuple(family.tokenizer.convert_tokens_to_ids(list(CHAT)))
    row = row_of(*TWO_TURNS)
    conversation = conversation_of(family, row)
    assert pieces(family, conversation) == [
        (True, "[1, 2]<|im_end|>"),
        (False, "\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "12<|im_end|>"),
    ]
    kept = len(conversation.prompt.token_ids_P) + len(conversation.token_ids_L)
    assert conversation_length(family, row, (), None) == kept
    assert turn_end_line(family) == (
        "an assistant's turn ends with <|im_end|>, as the chat template writes it; a completion ends with <|im_end|> "
        "or <|endoftext|>"
    )


def test_every_engine_stops_at_the_templates_end(base):
    family = family_with(base, None)
    chat, own = family.tokenizer.convert_tokens_to_ids(list(CHAT))
    draw = TokenDraw(SamplingParams(max_new_tokens=4), family, family.vocabulary_size, torch.device("cpu"))
    assert draw.ends(torch.tensor([chat, own, chat - 1])).tolist() == [True, True, False]
    assert sampling_fields(family, SamplingParams(max_new_tokens=4), 0)["stop_token_ids"] == [chat, own]
    answer = encode_answer(family, [Message(role="user", content="Go on.")], ())
    assert int(answer.token_ids_L[0]) == chat


@pytest.mark.parametrize("said", (None, "own", ["own"], "chat", ["own", "chat"], ["chat", "own", 3]))
def test_a_saved_model_stops_where_its_run_did(base, tmp_path, said):
    """The source has no generation config, or lists some of the two ends."""
    policy = tiny_policy(base, None)
    chat, own = policy.family.tokenizer.convert_tokens_to_ids(list(CHAT))
    ids = {"chat": chat, "own": own}
    given = [ids.get(each, each) for each in said] if isinstance(said, list) else ids.get(said)
    if said is not None:
        (base / "generation_config.json").write_text(json.dumps({"top_p": 0.1, "eos_token_id": given}, indent=1))
        policy = tiny_policy(base, None)
    save_model(policy.family, policy.model, tmp_path / "saved")
    read = GenerationConfig.from_pretrained(tmp_path / "saved")
    if isinstance(said, list) and "chat" in said and "own" in said:
        written, source = ((folder / "generation_config.json").read_bytes() for folder in (tmp_path / "saved", base))
        assert written == source
    else:
        assert read.eos_token_id == [chat, own]
    assert read.top_p == (None if said is None else 0.1)


def test_an_instruct_models_turns_end_as_before(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"])))
    assert family.checkpoint.end_token_ids == (family.tokenizer.eos_token_id,)
    assert turn_end_line(family) == "an assistant's turn ends with <|im_end|>, as the chat template writes it"


def test_another_token_of_the_recipes_template(base):
    family = family_with(base, " <|vision_end|>")
    end = family.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    assert family.checkpoint.end_token_ids[0] == end
    assert [text for scored, text in pieces(family, conversation_of(family, row_of(*TWO_TURNS))) if scored] == [
        "[1, 2] <|vision_end|>",
        "12 <|vision_end|>",
    ]


@pytest.mark.parametrize("end", ["", " ", "\\n\\n"])
def test_a_template_without_an_end(base, end):
    """The context of a later turn is what sampling would see; only the last turn has an end to learn."""
    family = family_with(base, end)
    row = row_of(*TWO_TURNS)
    conversation = conversation_of(family, row)
    ids = [*conversation.prompt.token_ids_P.tolist(), *conversation.token_ids_L.tolist()]
    own = family.tokenizer.eos_token_id
    assert ids.count(own) == 1 and ids[-1] == own and bool(conversation.is_scored_L[-1])
    prompt = encode_prompt(family, row, 0, [], system=None, max_prompt_tokens=400)
    text = family.tokenizer.decode(ids)
    assert text.startswith(prompt.text)
    assert conversation_length(family, row, (), None) == len(ids)
    line = turn_end_line(family)
    assert line is not None and "no end" in line and line.count(CHAT[1]) == 2


@pytest.mark.parametrize("end", ["<|eot|>", " ###"])
def test_an_end_that_is_no_token_is_refused_for_what_is_trained(base, end):
    family = family_with(base, end)
    row = row_of(*TWO_TURNS)
    for see in (lambda: conversation_of(family, row), lambda: conversation_length(family, row, (), None)):
        with pytest.raises(
            DataError, match=r"which is not a token of this tokenizer.*such as <\|endoftext\|>"
        ) as error:
            see()
        assert end.strip() in str(error.value)
    assert encode_prompt(family, row, 0, [], system=None, max_prompt_tokens=400).text  # sampling has rollout.stop


def test_a_template_that_refuses_the_question_leaves_the_tokenizers_end(base):
    (base / "refusing.jinja").write_text("{{ raise_exception('no') }}")
    family = load_family(Model(path=str(base)), str(base / "refusing.jinja"))
    assert family.checkpoint.end_token_ids == (family.tokenizer.eos_token_id,)
    assert turn_end_line(family) is None


SYSTEM = ("system", "Be brief.")


def with_template(folder: Path, old: str, new: str) -> Family:
    own = (folder / "chat_template.jinja").read_text()
    assert old in own
    (folder.parent / "other.jinja").write_text(own.replace(old, new))
    return load_family(Model(path=str(folder)), str(folder.parent / "other.jinja"))


@pytest.mark.parametrize("role", ("system", "user"))
@pytest.mark.parametrize("change", ("drops", "changes"))
def test_a_template_that_drops_or_changes_a_turn_rejects_the_row(base, role, change):
    text = "{{ part['text'] }}"
    other = "''" if change == "drops" else "part['text']|upper"
    family = with_template(base, text, f"{{{{ {other} if message['role'] == '{role}' else part['text'] }}}}")
    row = row_of(SYSTEM, *TWO_TURNS)
    for see in (
        lambda: conversation_of(family, row),
        lambda: conversation_length(family, row, (), None),
        lambda: prompt_length(family, row, (), None),
    ):
        with pytest.raises(DataError, match=f"drops text from a turn with role {role}: "):
            see()


@pytest.mark.parametrize("other", ("''", "part['text']|upper", "part['text'][::-1]"))
def test_a_template_that_drops_or_changes_an_answer_is_refused(base, other):
    new = f"{{{{ {other} if message['role'] == 'assistant' else part['text'] }}}}"
    with pytest.raises(ModelError, match="drops or changes what the assistant says"):
        with_template(base, "{{ part['text'] }}", new)


def test_a_template_that_does_not_ask_the_policy_is_refused(base):
    with pytest.raises(
        ModelError, match=r"writes '<\|im_start\|>assistant' before an assistant's turn, but not before"
    ):
        with_template(base, "{% if add_generation_prompt %}", "{% if false %}")
    # a template without any words before an answer has no generation prompt
    bare = "{% for message in messages %}{{ message['content'][0]['text'] }}<|im_end|>{% endfor %}"
    with_template(base, (base / "chat_template.jinja").read_text(), bare)


def test_a_thought_that_the_template_opens_is_seen_before_a_start(base):
    family = with_template(base, "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    for see in (conversation_of, lambda family, row: conversation_length(family, row, (), None)):
        with pytest.raises(DataError, match="the chat template changes earlier turns"):
            see(family, row_of(*TWO_TURNS))


@pytest.mark.parametrize("role", ("system", "user", "assistant"))
def test_the_text_of_an_end_within_a_turn_rejects_the_row(base, role):
    family = family_with(base, None)
    turns = [SYSTEM, *TWO_TURNS]
    place = next(number for number, turn in enumerate(turns) if turn[0] == role)
    turns[place] = (role, f"a {CHAT[1]} b")
    with pytest.raises(DataError, match=rf"the {role} turn contains <\|endoftext\|>, which ends a turn"):
        conversation_length(family, row_of(*turns), (), None)


def test_of_several_templates_the_default_is_taken(base):
    own = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": own}, {"name": "tool_use", "template": "x"}]
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert load_family(Model(path=str(base))).checkpoint.chat_template == own


def test_an_end_token_without_an_embedding_is_refused(base):
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|what|>"}))
    with pytest.raises(ModelError, match=r"'<\|what\|>' ends a turn in its tokenizer, as token 321, but its model has"):
        load_family(Model(path=str(base)))


def test_a_tokenizer_that_numbers_pictures_otherwise_is_refused(base, tiny_checkpoints):
    config = json.loads((base / "config.json").read_text())
    image, video = config["image_token_id"], config["video_token_id"]
    (base / "config.json").write_text(json.dumps(config | {"image_token_id": video, "video_token_id": image}))
    with pytest.raises(
        ModelError, match=rf"token {video} for pictures, but <\|image_pad\|> is {image} in its tokenizer"
    ):
        load_family(Model(path=str(base)))

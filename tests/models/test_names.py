"""Models by the names that people ask for (docs/families.md), each as a tiny checkpoint in the published form."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6

from tests.generic_models import GENERIC, TEXT, has_processor, save_generic_checkpoint
from tests.models.test_families import huggingface_inputs, items_of
from tests.tiny_models import noise_image, save_tiny_checkpoint, tiny_policy
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.schema import Model
from tiercel.errors import DataError, ModelError
from tiercel.models.chat import encode_answer, require_joining
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import encode_conversation
from tiercel.models.rendering import render, token_ids
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.saving import save_model
from tiercel.models.weights.unsupported_checkpoints import UNSUPPORTED
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.forward_equivalence_check import check_forward_equivalence
from tiercel.packing.layout import pack
from tiercel.types import ImageSource, Message, Row

WRITTEN = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
TURN = "{% set text = written(m.content) %}{% set thought = m.reasoning_content or '' %}"
SPLIT = (
    "{% if not thought and '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
QWEN = (
    WRITTEN.replace("MARKER", "<|vision_start|><|image_pad|><|vision_end|>")
    + "EFFORT{% set last = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + TURN
    + "SPLIT{% if m.role == 'assistant' and (KEPT or loop.index0 > last.asked) %}<think>\n{{ thought | trim }}\n"
    "</think>\n\n{% endif %}{{ text }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# What the published templates do with thoughts: earlier ones are dropped unless they are asked for.
QWEN_36 = (
    QWEN.replace("EFFORT", "")
    .replace("SPLIT", SPLIT)
    .replace("KEPT", "preserve_thinking is defined and preserve_thinking")
)
# Earlier thoughts are kept, but found only in a field of their own; an effort is written, and an unknown one refused.
QWEN_38 = (
    QWEN.replace("SPLIT", "")
    .replace("KEPT", "preserve_thinking is undefined or preserve_thinking")
    .replace(
        "EFFORT",
        "{% if enable_thinking is undefined or enable_thinking %}{% set effort = reasoning_effort | default('xhigh') %}"
        "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('unexpected effort ' ~ effort) }}"
        "{% elif effort != 'medium' %}<|im_start|>system\nThe effort is {{ effort }}.<|im_end|>\n{% endif %}"
        "{% endif %}",
    )
)
# No token ends a turn: the next one's first does.
GLM = (
    "[gMASK]<sop>"
    + WRITTEN.replace("MARKER", "<|begin_of_image|><|image|><|end_of_image|>")
    + "{% for m in messages %}"
    + TURN
    + SPLIT
    + "{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ thought | trim }}</think>\n{{ text }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ text }}{% else %}<|{{ m.role }}|>\n{{ text }}"
    "{% if enable_thinking is defined and not enable_thinking %}/nothink{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>\n' }}{% endif %}{% endif %}"
)
GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_ENDS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def qwen(directory: Path, family: str, template: str) -> Path:
    save_tiny_checkpoint(family, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def internvl(directory: Path, text: dict[str, Any]) -> Path:
    """InternVL3.5 in transformers' own form: a decoder of Qwen3, with or without experts."""
    save_tiny_checkpoint("internvl", directory)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory)
    size = {"vocab_size": config.text_config.vocab_size, "tie_word_embeddings": False, "head_dim": 16}
    config.text_config = AutoConfig.for_model(**TEXT | size | text)
    config.tie_word_embeddings = False
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    file = directory / "config.json"
    published = json.loads(file.read_text())
    published["text_config"] |= {"rope_theta": published["text_config"].pop("rope_parameters")["rope_theta"]}
    file.write_text(json.dumps(published | {"transformers_version": "4.55.0"}))
    return directory


def glm(directory: Path, name: str) -> Path:
    tiny = GENERIC[name]
    save_generic_checkpoint(replace(tiny, tokens=tiny.tokens + GLM_TOKENS), directory)
    (directory / "chat_template.jinja").write_text(GLM)
    ids = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(GLM_ENDS)
    for file, key, value in (
        ("generation_config", "eos_token_id", ids),
        ("tokenizer_config", "eos_token", GLM_ENDS[0]),
    ):
        path = directory / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return directory


def llava(directory: Path) -> Path:
    """LLaVA with the names of its published weights, which transformers gives no new model."""
    file = save_generic_checkpoint(GENERIC["llava"], directory) / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return directory


MAKERS = {
    "Qwen3.6-27B": lambda place: qwen(place, "qwen3_5", QWEN_36),
    "Qwen3.6-35B-A3B": lambda place: qwen(place, "qwen3_5_moe", QWEN_36),
    "Qwen3.8-27B": lambda place: qwen(place, "qwen3_5", QWEN_38),
    "InternVL3_5-8B-HF": lambda place: internvl(place, {"model_type": "qwen3"}),
    "InternVL3_5-30B-A3B-HF": lambda place: internvl(place, {"model_type": "qwen3_moe"} | EXPERTS),
    "llava-1.5-7b-hf": llava,
    "GLM-4.6V-Flash": lambda place: glm(place, "glm46v_flash"),
    "GLM-4.6V": lambda place: glm(place, "glm46v_moe"),
    "MiniCPM-V-4.6": lambda place: save_generic_checkpoint(GENERIC["minicpmv4_6"], place),
}
OF_TORCHVISION = {"GLM-4.6V-Flash": "glm46v_flash", "GLM-4.6V": "glm46v_moe", "MiniCPM-V-4.6": "minicpmv4_6"}
FAMILY = {"Q": "qwen3_5", "I": "internvl"}  # by a name's first letter; the others are proved


def needing(name: str):
    if name == "MiniCPM-V-4.6" and hasattr(modeling_minicpmv4_6, "get_vision_merged_shape"):
        reason = "this transformers computes pictures of several sizes as if they had the first one's"
        return pytest.param(name, marks=pytest.mark.skip(reason=reason))
    can = name not in OF_TORCHVISION or has_processor(OF_TORCHVISION[name])
    return pytest.param(name, marks=pytest.mark.skipif(not can, reason="its processor needs torchvision"))


NAMES = tuple(map(needing, MAKERS))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the checkpoint of a name, made once."""
    root, found = tmp_path_factory.mktemp("names"), {}

    def of(name: str) -> Path:
        if name not in found:
            found[name] = MAKERS[name](root / name)
        return found[name]

    return of


def row_of(*turns: tuple[str, str], images: int = 0) -> Row:
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    sources = tuple(ImageSource(path=f"{number}.png") for number in range(images))
    return Row(id="r", messages=messages, images=sources, columns={}, file="f", line=1)


def learnt(family, *turns: tuple[str, str]) -> str:
    """The text that SFT trains on."""
    found = encode_conversation(family, row_of(*turns), 0, (), system=None, max_prompt_tokens=999)
    return family.tokenizer.decode(found.token_ids_L[found.is_scored_L])


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(made, name):
    policy = tiny_policy(made(name), noise=0.1)
    if policy.family.needs_proof:
        assert check_forward_equivalence(policy).obstacle is None
        return
    assert policy.family.name.startswith(FAMILY[name[0]])
    items = items_of(policy.family, torch.Generator().manual_seed(5))
    packed = pack(items)
    with torch.no_grad():
        found = PackedPolicy(policy, "split", False)(packed, VisionStore(policy, 0).features(packed.images), 1.0)
        plain = []
        for item in items:
            for continuation in item.continuations:
                ids_T = torch.cat([item.prompt.token_ids_P, continuation.token_ids_L])
                logits = policy.model(**huggingface_inputs(policy.family, item.prompt, ids_T)).logits[0]
                logits[:, list(policy.family.placeholder_ids)] = -torch.inf
                rows = logits[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
                plain.append(rows.gather(1, continuation.token_ids_L[:, None])[:, 0])
    torch.testing.assert_close(found.logprobs_N, torch.cat(plain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_merged_model_has_the_published_names_of_weights(made, name, tmp_path):
    policy = tiny_policy(made(name), noise=0.1)
    save_model(policy.family, policy.peft.merge_and_unload(safe_merge=True), tmp_path)
    names = []
    for directory in (made(name), tmp_path):
        with safe_open(directory / "model.safetensors", "pt") as weights:
            names.append(set(weights.keys()))
    assert names[0] == names[1]


@pytest.mark.parametrize("name", NAMES)
def test_check_takes_it(made, name, tmp_path, capsys):
    recipe = grpo_recipe(made(name), write_rows(tmp_path), tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert ("proved: logprobs differ" in said) == (name[0] not in FAMILY)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_the_authors_own_form_names_the_one_that_works(tmp_path, key):
    form = UNSUPPORTED[key]
    kind = {"architectures": [key], "model_type": "llava"} if key.startswith("Llava") else {"model_type": key}
    (tmp_path / "config.json").write_text(json.dumps(kind | {"auto_map": {"AutoModel": "modeling.Model"}}))
    with pytest.raises(ModelError) as error:
        load_family(Model(path=str(tmp_path)))
    said = str(error.value)
    assert form.name in said and form.instead in said and "\n" not in said
    assert ("no class for it" in said) == (key == "kimi_vl")
    assert (f"convert_{form.folder}_weights_to_hf.py" in said) == bool(form.folder)


def test_thoughts_are_learnt_once_in_qwen36_and_qwen38(made):
    thought = ("user", "Where"), ("assistant", "<think>\n1\n</think>\n\nseven")
    for name in ("Qwen3.6-27B", "Qwen3.8-27B"):
        family = load_family(Model(path=str(made(name))))
        assert learnt(family, *thought) == "1\n</think>\n\nseven<|im_end|>"
        assert learnt(family, ("user", "Where"), ("assistant", "seven")) == "\n</think>\n\nseven<|im_end|>"
        silent = load_family(Model(path=str(made(name))), template_arguments={"enable_thinking": False})
        assert learnt(silent, ("user", "Where"), ("assistant", "seven")) == "seven<|im_end|>"
        with pytest.raises(DataError, match="changes earlier turns"):
            learnt(silent, *thought)


def test_qwen36_keeps_earlier_thoughts_when_told_and_qwen38_always(made):
    turns = ("user", "Where"), ("assistant", "<think>1</think>seven"), ("user", "?"), ("assistant", "<think>2</think>8")
    expected = "1\n</think>\n\nseven<|im_end|>2\n</think>\n\n8<|im_end|>"
    forgetful = load_family(Model(path=str(made("Qwen3.6-27B"))))
    with pytest.raises(DataError, match=r"data\.template_arguments: \{preserve_thinking: true\}"):
        learnt(forgetful, *turns)
    with pytest.raises(ModelError, match=r"data\.template_arguments: \{preserve_thinking: true\}"):
        require_joining(forgetful, "user")
    for name, arguments in (("Qwen3.6-27B", {"preserve_thinking": True}), ("Qwen3.8-27B", {})):
        family = load_family(Model(path=str(made(name))), template_arguments=arguments)
        assert learnt(family, *turns) == expected
        require_joining(family, "user")


def test_qwen38_writes_the_effort_that_the_recipe_sets(made):
    asked = [Message(role="user", content="Where")]
    prompts = {}
    for effort in ("low", "medium", "high"):
        arguments = {"reasoning_effort": effort}
        prompts[effort] = load_family(Model(path=str(made("Qwen3.8-27B"))), template_arguments=arguments)
    assert "The effort is low." in render(prompts["low"], asked, True)
    assert render(prompts["medium"], asked, True).startswith("<|im_start|>user")
    with pytest.raises(DataError, match="unexpected effort high"):
        render(prompts["high"], asked, True)


@pytest.mark.skipif(not has_processor("glm46v_flash"), reason="its processor needs torchvision")
def test_what_follows_a_turn_of_glm_ends_it(made):
    family = load_family(Model(path=str(made("GLM-4.6V-Flash"))))
    answers = {"user": "<|user|>\nseven<|assistant|>", "tool": "<|observation|>\nseven<|assistant|>"}
    for role, text in answers.items():
        require_joining(family, role)
        answer = Message(role=role, content="seven", tool="look" if role == "tool" else None)
        assert family.tokenizer.decode(encode_answer(family, [answer], ()).token_ids_L) == text
    assert learnt(family, ("user", "Where"), ("assistant", "seven")) == "\n<think></think>\nseven<|endoftext|>"


@pytest.mark.skipif(not has_processor("minicpmv4_6"), reason="its processor needs torchvision")
def test_pictures_of_minicpm_are_numbered_through_the_conversation(made):
    family = load_family(Model(path=str(made("MiniCPM-V-4.6"))))
    pictures = [noise_image(84, 56, 1), noise_image(200, 90, 2), noise_image(56, 84, 3)]
    images = [family.encode_image(picture) for picture in pictures]
    turns = ("user", "<image><image>Where"), ("assistant", "seven"), ("user", "<image>?"), ("assistant", "8")
    found = encode_conversation(family, row_of(*turns, images=3), 0, images, system=None, max_prompt_tokens=999)
    ids = torch.cat([found.prompt.token_ids_P, found.token_ids_L]).tolist()
    text = render(family, [Message(role=role, content=content) for role, content in turns], False)
    plain = text
    for number in range(3):
        assert text.count(f"<image_id>{number}</image_id>") == 1
        plain = plain.replace(f"<image_id>{number}</image_id>", "")
    whole = family.processor(text=[plain], images=pictures, return_tensors="pt")["input_ids"][0].tolist()
    assert ids == whole[: len(ids)]
    answer = encode_answer(family, [Message(role="user", content="<image>")], images[2:], shown=2)
    assert "<image_id>2</image_id>" in family.tokenizer.decode(answer.token_ids_L)
    asked = [Message(role=role, content=content) for role, content in turns[:3]]
    before = token_ids(family, render(family, asked[:1], True), [image.plan for image in images[:2]])
    said = family.tokenizer("seven")["input_ids"]
    follows = encode_answer(family, asked[2:], images[2:], shown=2).token_ids_L.tolist()
    assert before + said + follows == token_ids(family, render(family, asked, True), [image.plan for image in images])


def test_the_document_has_every_name():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.partition("## Models by the name people ask for")[2].partition("\n## ")[0]
    assert all(f"/{name}`" in table for name in MAKERS)
    named = (name for form in UNSUPPORTED.values() for name in form.instead.split(", ") if "InternVL3-" not in name)
    assert all(f"`{name}`" in table for name in named if name)


def test_a_checkpoint_with_code_of_its_own_is_refused_though_transformers_has_its_class(tmp_path):
    config = {"model_type": "kimi_k25", "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\(auto_map\)"):
        load_family(Model(path=str(tmp_path)))

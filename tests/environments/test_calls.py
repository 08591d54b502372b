"""Tool calls in the forms that checkpoints write."""

from types import SimpleNamespace

import pytest

from tiercel.environments.calls import CallReader, Malformed
from tiercel.errors import ModelError

PARAMETERS = {"box": {"type": "array"}, "image": {"type": "integer"}, "label": {"type": "string"}}
ZOOM = {
    "type": "function",
    "function": {"name": "zoom", "parameters": {"type": "object", "properties": PARAMETERS}},
}
HERMES, QWEN35, GLM, GEMMA4 = "<tool_call>", "<tool_call>\n<function=", "<tool_call>..<arg_key>", "<|tool_call>call:"
MISTRAL, MISTRAL_ARGS = "[TOOL_CALLS]", "[TOOL_CALLS]..[ARGS]"
BOX = {"box": [1, 2, 3, 4]}
PROMPT = "<|im_start|>user\n<think> so</think><|im_end|>\n<|im_start|>assistant\n"


def family_of(template, **tokenizer):
    return SimpleNamespace(
        tokenizer=SimpleNamespace(**tokenizer), checkpoint=SimpleNamespace(path="model", chat_template=template)
    )


def read(template, text, prompt=PROMPT):
    calls = CallReader(family_of(template), None, [ZOOM]).read(text, prompt)
    assert all(call.failure is None for call in calls)
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("template", "text", "calls"),
    [
        (
            HERMES,
            'So.\n<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}}\n</tool_call>',
            [("zoom", BOX)],
        ),
        (
            HERMES,
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "b", "arguments": {"x": "</a>"}}',
            [("a", {}), ("b", {"x": "</a>"})],
        ),
        (
            QWEN35,
            "<tool_call>\n<function=zoom>\n<parameter=box>\n[1, 2, 3, 4]\n</parameter>\n"
            "<parameter=image>\n2\n</parameter>\n<parameter=label>\n7\nlines\n</parameter>\n</function>\n</tool_call>",
            [("zoom", {**BOX, "image": 2, "label": "7\nlines"})],
        ),
        (
            GLM,
            "<tool_call>zoom\n<arg_key>box</arg_key>\n<arg_value>[1, 2, 3, 4]</arg_value>\n"
            "<arg_key>label</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
            [("zoom", {**BOX, "label": "7"})],
        ),
        (
            GEMMA4,
            'x<|tool_call>call:zoom{box:[1,2,3,4],label:<|"|>a "b", {c}<|"|>}<tool_call|>'
            "<|tool_call>call:b{}<tool_call|>",
            [("zoom", {**BOX, "label": 'a "b", {c}'}), ("b", {})],
        ),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}}, {"name": "b", "arguments": {}}]',
            [("zoom", BOX), ("b", {})],
        ),
        (MISTRAL_ARGS, 'x[TOOL_CALLS]zoom[ARGS]{"box": [1, 2, 3, 4]}[TOOL_CALLS]b[ARGS]{}', [("zoom", BOX), ("b", {})]),
    ],
)
def test_calls_in_every_form(template, text, calls):
    assert read(template, text) == calls


@pytest.mark.parametrize("template", [HERMES, QWEN35, GLM, GEMMA4, MISTRAL, MISTRAL_ARGS])
def test_a_turn_without_calls_has_none(template):
    assert read(template, "The box is {4}, <b>.") == [] == read(template, "")


def test_thoughts_hold_no_calls():
    call = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>'
    assert read(HERMES, f"<think>I could {call}</think> 7") == []
    opened = PROMPT + "<think>\n"
    assert read(HERMES, f"I could {call}</think> 7", opened) == []
    assert read(HERMES, f"I will</think>{call}", opened) == [("zoom", {})]


@pytest.mark.parametrize(
    ("template", "text", "reason"),
    [
        (HERMES, '<tool_call>{"name": "zoom", "arguments": {"box": [1</tool_call>', "Expecting ',' delimiter"),
        (HERMES, '<tool_call>{"name": "zoom"}</tool_call>', 'a text "name" and an object "arguments"'),
        (HERMES, '<tool_call>{"name": "zoom", "arguments": "[1]"}</tool_call>', 'an object "arguments"'),
        (HERMES, "<tool_call>[1]</tool_call>", 'an object "arguments"'),
        (HERMES, "<tool_call></tool_call>", "Expecting value"),
        (HERMES, '<tool_call>{"name": "zoom", "arguments": {"x": NaN}}</tool_call>', "not JSON compliant"),
        (HERMES, '<tool_call>{"name": "zoom", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        (HERMES, "<tool_call>" + "[" * 100_000, "recursion"),
        (QWEN35, "<tool_call>\nzoom(1)\n</tool_call>", "what follows <tool_call> is no tool call"),
        (GEMMA4, "<|tool_call>zoom{box:[1]}<tool_call|>", r"what follows <\|tool_call> is no tool call"),
        (GEMMA4, "<|tool_call>call:zoom{box}<tool_call|>", "Expecting property name"),
        (MISTRAL, "[TOOL_CALLS]zoom(1)", "Expecting value"),
        (MISTRAL_ARGS, '[TOOL_CALLS]zoom{"box": [1]}', "is no tool call"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_in_a_few_words(template, text, reason):
    with pytest.raises(Malformed, match=reason) as caught:
        read(template, text)
    assert len(str(caught.value)) < 260


def test_a_tokenizers_own_response_template_is_taken():
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close": ";",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.n}", "arguments": "{content.a}"}},
            }
        },
    }
    reader = CallReader(family_of("no form", response_template=template), None, [ZOOM])
    (call,) = reader.read('CALL {"n": "zoom", "a": {"image": 2}};', PROMPT)
    assert (call.name, call.arguments) == ("zoom", {"image": 2})


def test_a_system_message_may_show_the_form_where_the_template_has_none():
    with pytest.raises(ModelError, match=r"data\.template: the chat template of model writes no tool calls"):
        CallReader(family_of("{{ messages }}"), "Answer briefly.", [ZOOM])
    reader = CallReader(family_of("{{ messages }}"), 'Write <tool_call>{"name": ...}</tool_call>.', [ZOOM])
    assert len(reader.read('<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', PROMPT)) == 1

"""A small tokenizer in the real format: bytes, whole words, whole numbers, and Qwen's special tokens."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes tools as names and arguments, calls in Hermes' tags, and answers of tools in a user turn, as Qwen does.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){% if not loop.last %}, {% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}{% set is_tool = message.role == 'tool' %}"
    "<|im_start|>{{ 'user' if is_tool else message.role }}\n{% if is_tool %}<tool_response>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>"""
    "{% endfor %}{% if is_tool %}</tool_response>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PIECES = Regex(r"\d+|, |; | ?[A-Za-z]+|\s|.")


def make_tokenizer(
    words: Sequence[str],
    special_tokens: Sequence[str] = QWEN_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
    names: Mapping[str, str] = MappingProxyType({}),
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which each piece of `words` is one token; other text is encoded as bytes. `names` are
    attributes by which a processor asks the tokenizer for special tokens. `tags` are texts that are tokens but not
    special ones."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in words:
        for piece, _ in splitter.pre_tokenize_str(word):
            vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        extra_special_tokens=dict(names),
    )

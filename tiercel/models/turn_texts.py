"""What the texts of turns must not contain: what the chat template writes itself, and the marks of other frameworks."""

import re
from collections.abc import Sequence

from tiercel.errors import DataError
from tiercel.message_text import brief
from tiercel.models.families.base import Family
from tiercel.types import Message

# Marks of a picture in rows of other frameworks: <img>FILE</img> of Qwen-VL, <|image_1|> of Phi-3, (image)[image-1.png]
# of M3Exam; the tokens of InternVL, Gemma, Kimi-VL and others, which only some models have. Marks that texts about XML
# may have as well, such as <Image>, are in data/marks.py.
FOREIGN_MARK = re.compile(
    r"<img>[^<>\n]*</img>|<\|[Ii](?:mage|MAGE)[ _-]?\d+\|>|<image>\./</image>|<ImageHere>|<image_placeholder>"
    r"|<\|image\|>|\(image\) ?\[image[^\]\n]{1,20}\]|<image_(?:token|here|soft_token)>"
    r"|<start_of_image>|<IMG_CONTEXT>|<\|media_(?:pad|placeholder)\|>|<__media__>|<\|image_pad\|>"
)
FOREIGN_VIDEO_MARK = re.compile(
    r"<vid>[^<>\n]*</vid>|<\|[Vv](?:ideo|IDEO)[ _-]?\d+\|>|<VideoHere>|<video_(?:placeholder|token|here)>"
    r"|<\|video(?:_pad)?\|>"
)
# How chat templates begin and end a turn, as in rows that were written with one: of this model or of another.
RENDERED_BEGIN = re.compile(
    r"(?:\s|<image>|<video>)*("  # pictures without marks of their own come first
    r"(?:<s>\s*)?\[INST\](?=.*\[/INST\])|<\|(?:im_start|begin_of_text|start_header_id|user|system|assistant)\|>"
    r"|<(?:bos|start_of_turn|\uff5c(?:User|Assistant)\uff5c)>|USER:(?=.*ASSISTANT:\s*$))",
    re.DOTALL,
)
RENDERED_END = re.compile(
    r"(<\|(?:im_end|endoftext|eot_id|eom_id|end_of_text|end|return)\|>"
    r"|<(?:eos|end_of_turn|\uff5cend\u2581of\u2581sentence\uff5c)>|</s>)\s*$"
)


def require_plain_texts(family: Family, messages: Sequence[Message]) -> None:
    """Raise DataError if a turn has a token that the chat template writes around turns, is already written as a chat
    template writes it, or has another framework's mark of a picture or a video, which the model would read as text."""
    _require_no_end(family, messages)
    for message in messages:
        _require_not_rendered(family, message)
        if family.image_marker is not None and message.role != "assistant":
            _require_own_marks(family, message)


def _require_no_end(family: Family, messages: Sequence[Message]) -> None:
    for end in family.tokenizer.convert_ids_to_tokens(list(family.checkpoint.end_token_ids)):
        if odd := next((message for message in messages if end in message.content), None):
            raise DataError(
                f"the {odd.role} turn contains {end}, which ends a turn and is written by the chat template itself; "
                "remove it",
                field="messages",
            )


def _require_not_rendered(family: Family, message: Message) -> None:
    if own := next((token for token in family.turn_tokens if token in message.content), None):
        raise DataError(
            f"the {message.role} turn contains {own}, which the chat template itself writes around a turn; give only "
            "what is said in the turn",
            field="messages",
        )
    if begin := RENDERED_BEGIN.match(message.content):
        raise DataError(
            f"the {message.role} turn begins with {begin[1]}, as a chat template writes it, and the model's own would "
            "be written around that; give only what is said in the turn",
            field="messages",
        )
    end = RENDERED_END.search(message.content) if message.role == "assistant" else None  # others are not learnt
    # In HTML </s> ends a struck text, and in SSML a sentence.
    if end and not (end[1] == "</s>" and re.search(r"<s[\s>]", message.content, re.IGNORECASE)):
        raise DataError(
            f"the {message.role} turn ends with {end[1]}, which ends a turn of other models and is text for this one; "
            "remove it",
            field="messages",
        )


def _require_own_marks(family: Family, message: Message) -> None:
    own = (family.image_marker or "") + (family.video_marker or "")
    images, videos = (
        (found.group() for found in marks.finditer(message.content) if found.group() not in own)
        for marks in (FOREIGN_MARK, FOREIGN_VIDEO_MARK)
    )
    if mark := next(images, None):
        raise DataError(
            f"the {message.role} turn contains {brief(mark, 60)}, a mark of a picture in another "
            "framework, which the model would read as text; write <image> there, and list the picture in `images`",
            field="messages",
        )
    if mark := next(videos, None):
        raise DataError(
            f"the {message.role} turn contains {brief(mark, 60)}, a mark of a video in another "
            "framework, which the model would read as text; write <video> there, and list the video in `videos`",
            field="messages",
        )

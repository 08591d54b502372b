"""How an assistant's turn ends: with the token that the chat template writes after it, which need not be the
tokenizer's own end token. A base model's is `<|endoftext|>`, say, where a template of chats writes `<|im_end|>`."""

from dataclasses import replace

from tiercel.errors import DataError, ModelError
from tiercel.models.family import Family, TurnEnd
from tiercel.models.prompts import render
from tiercel.models.turns import ASKED, WRITTEN


def take_turn_end(family: Family) -> None:
    """Find the end of a turn by the template, and put its token before the others that end a completion. A template
    that refuses a conversation of two turns leaves the family as it is. Raises ModelError where it does not write what
    the assistant says, or begins that turn otherwise than the policy is asked to."""
    try:
        conversation = render(family, [ASKED, WRITTEN], False)
        asked, prompt = (render(family, [ASKED], is_prompt) for is_prompt in (False, True))
    except DataError:
        return
    start, found, text = conversation.rpartition(WRITTEN.content)
    if not found:
        raise ModelError(
            "the chat template leaves out or changes what the assistant says; set data.template to one that writes it "
            "as it is"
        )
    header = start.removeprefix(prompt).strip()
    if asked == prompt and start.startswith(prompt) and header:
        raise ModelError(
            f"the chat template writes {header!r} before an assistant's turn, but not where the policy is to answer "
            "(add_generation_prompt); set data.template to one that does"
        )
    checkpoint, tokenizer = family.checkpoint, family.tokenizer
    more_than_text = {*tokenizer.added_tokens_decoder, *checkpoint.end_token_ids}
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    token = next((token for token in ids if token in more_than_text), None)
    family.turn_end = TurnEnd(text=text, token=token)
    if token is not None:
        ends = dict.fromkeys((token, *checkpoint.end_token_ids))
        family.checkpoint = replace(checkpoint, end_token_ids=tuple(ends))


def turn_end_line(family: Family) -> str | None:
    """Say for `check` what ends a turn; None where the template did not tell."""
    end, names = family.turn_end, family.tokenizer.convert_ids_to_tokens(list(family.checkpoint.end_token_ids))
    if end is None:
        return None
    listed = " or ".join(names)
    if end.token is not None:
        if len(names) == 1:
            return f"an assistant's turn ends with {names[0]}, as the chat template writes it"
        return f"an assistant's turn ends with {names[0]}, as the chat template writes it; a completion with {listed}"
    if end.text.strip():
        return (
            f"the chat template writes {end.text.strip()!r} after an assistant's turn, which is no token of this "
            f"tokenizer: a completion ends with {listed}"
        )
    return (
        f"the chat template writes no end after an assistant's turn: a completion ends with {listed}, and {names[0]} "
        "is trained after the last turn"
    )

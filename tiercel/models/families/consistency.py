"""Check that a checkpoint's config, tokenizer and image processor belong to one model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tiercel.errors import ModelError
from tiercel.models.families.base import Family
from tiercel.models.weights.checkpoint_files import named_few

USUAL_SIZE = (640, 480)  # (width, height) of a picture that every image processor takes


def require_end_tokens(family: Family) -> None:
    """Raise ModelError if a token that ends a completion has no embedding, because it could never be sampled."""
    if odd := [token for token in family.checkpoint.end_token_ids if token >= family.vocabulary_size]:
        raise ModelError(
            f"{family.checkpoint.path}: {family.tokenizer.convert_ids_to_tokens(odd[0])!r} ends a turn in its "
            f"tokenizer, as token {odd[0]}, but its model has only {family.vocabulary_size} embeddings; correct "
            "eos_token in tokenizer_config.json"
        )


def require_embeddings(path: Path, tokenizer: Any, count: int, placeholder_ids: Collection[int] = ()) -> None:
    """Raise ModelError if a tokenizer has more tokens than the model has embeddings. Special tokens may lie beyond, as
    in text-only Gemma 3; a row that contains one is refused when it is encoded."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= count}
    if odd := sorted(beyond.keys() - special - set(placeholder_ids)):
        raise ModelError(
            f"{path}: its tokenizer has {odd[-1] + 1} tokens, but its model only {count} embeddings, and none for "
            f"{named_few([beyond[number] for number in odd])}; add them with transformers' "
            f"resize_token_embeddings({odd[-1] + 1}) and save_pretrained, or use the tokenizer that belongs to the "
            "model"
        )


def require_placeholder(family: Family) -> None:
    """Raise ModelError if the token that config.json names for pictures is an ordinary word, or does not exist."""
    if family.needs_proof or family.image_marker is None:
        return
    token, path = family.placeholder_ids[0], family.checkpoint.path
    if family.marker_is_placeholder and token != (own := family.tokenizer.convert_tokens_to_ids(family.image_marker)):
        raise ModelError(
            f"{path}: config.json names token {token} for pictures, but {family.image_marker} is {own} in its "
            "tokenizer; config.json and tokenizer belong to different models"
        )
    if token not in family.tokenizer.added_tokens_decoder:
        word = family.tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(family.tokenizer) else None
        raise ModelError(
            f"{path}: config.json names token {token} for pictures, which in its tokenizer is "
            + (f"the ordinary {word!r}" if word else "none")
            + "; config.json and tokenizer belong to different models"
        )


def require_processor(family: Family) -> None:
    """Raise ModelError if the image processor cuts pictures into other patches than the model expects, or cannot
    process a picture at all."""
    processor, vision = family.checkpoint.image_processor, getattr(family.checkpoint.config, "vision_config", None)
    if processor is None or family.needs_proof:
        return
    place = f"{family.checkpoint.path}: preprocessor_config.json does not belong to this model: "
    for name, key in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        there, here = getattr(processor, name, None), getattr(vision, key, None)
        if isinstance(there, int) and isinstance(here, int) and there != here:
            raise ModelError(place + f"{name} is {there}, but in config.json {key} is {here}")
    for name in ("image_mean", "image_std"):
        if len(values := getattr(processor, name, None) or (0, 0, 0)) != 3:
            raise ModelError(place + f"{name} has {len(values)} numbers, but a pixel has 3 colours")
    try:
        family.image_token_ids(family.plan_image(USUAL_SIZE))
    except ModelError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(place + f"{type(error).__name__}: {error}") from error

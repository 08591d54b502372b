"""Prompts and pixels against Hugging Face's full processors, which need torchvision."""

import pytest
import torch

pytest.importorskip("torchvision", reason="the full processors need torchvision")

from tests.tiny_models import FAMILY_NAMES, make_row, noise_image
from tiercel.config.schema import Model
from tiercel.models.images import picture_image
from tiercel.models.loading import load_family
from tiercel.models.prompts import encode_prompt, prompt_messages, render


def full_processor(family):
    """The family's whole processor, images by torchvision."""
    checkpoint = family.checkpoint
    if family.name == "ovis2":
        from transformers import Ovis2ImageProcessor, Ovis2Processor

        images = Ovis2ImageProcessor(size=dict(checkpoint.image_processor.size), crop_to_patches=True, max_patches=4)
        return Ovis2Processor(
            image_processor=images,
            tokenizer=checkpoint.tokenizer,
            chat_template=checkpoint.chat_template,
            image_seq_length=family.tokens_per_tile,
        )
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    size = checkpoint.image_processor.size
    images = Qwen2VLImageProcessor(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
    chosen = Qwen2VLProcessor if family.name == "qwen2_vl" else Qwen2_5_VLProcessor
    return chosen(
        image_processor=images,
        tokenizer=checkpoint.tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=checkpoint.chat_template,
    )


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_ids_equal_the_full_processors(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    pictures = [noise_image(84, 56, 1), noise_image(120, 50, 2)]
    for count in (0, 1, 2):
        row = make_row("row", "<image>" * count + "Where is the seven?", count)
        images = [family.encode_image(picture) for picture in pictures[:count]]
        ours = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
        text = render(family, prompt_messages(row, row.messages), True)
        theirs = full_processor(family)(text=[text], images=pictures[:count] or None, return_tensors="pt")
        assert ours.token_ids_P.tolist() == theirs["input_ids"][0].tolist()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pixels_equal_the_full_processors_where_nothing_is_resized(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    picture = noise_image(56, 56, 4)
    image = family.encode_image(picture)
    assert image.plan.processed_size == (56, 56)
    text = render(family, make_row("row", "<image>Where", 1, None).messages, True)
    theirs = full_processor(family)(text=[text], images=[picture], return_tensors="pt")["pixel_values"]
    more = {} if name != "ovis2" else {"crop_to_patches": False}
    ours = family.checkpoint.image_processor(
        images=[picture_image(image.views[0])], do_resize=False, return_tensors="pt", **more
    )["pixel_values"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

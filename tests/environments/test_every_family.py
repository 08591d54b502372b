"""Environments and tools with every family of models."""

from dataclasses import replace
from io import BytesIO

import pytest
from PIL import Image

from tests.environments.test_dialogues import call, play
from tests.generic_models import GENERIC, save_generic_checkpoint
from tests.models.test_turns import WITH_TOOLS
from tests.rewards.samples import limits
from tests.tiny_models import FAMILY_NAMES, make_row
from tiercel.config.schema import Data, Model
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.processes import UserCode
from tiercel.environments.tools import Toolbox, load_toolbox
from tiercel.errors import RecipeError
from tiercel.geometry import from_original
from tiercel.models.families.loading import load_family
from tiercel.rollout.dialogue import Limits
from tiercel.types import ImageSource

DATA = Data(train="rows.jsonl")


def family_of(checkpoint, coordinates=None):
    family = load_family(Model(path=str(checkpoint)), None, coordinates)
    template = WITH_TOOLS.replace("MARKER", str(family.image_marker))
    family.checkpoint = replace(family.checkpoint, chat_template=template)
    return family


def dialogues_of(toolbox, family):
    most = Limits(max_turns=4, max_tokens=4000)
    return EnvironmentDialogues({None: toolbox}, family, data=DATA, reliability=limits(), limits=most, seed=0)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_zoom_finds_the_region_that_every_family_means(tiny_checkpoints, name):
    family = family_of(tiny_checkpoints[name], "thousandths" if name.startswith("gemma") else None)
    picture = Image.new("RGB", (300, 150))
    picture.paste((255, 255, 255), (210, 60, 240, 90))
    stream = BytesIO()
    picture.save(stream, "PNG")
    row = replace(make_row("row", "<image>Where?", 1), images=(ImageSource(data=stream.getvalue()),))
    prompt = prompt_encoder(family, DATA)(row, 0)
    (plan,) = (image.plan for image in prompt.images)
    box = from_original((210, 60, 240, 90), family.coordinate_space, plan.original_size, plan.processed_size)
    with dialogues_of(load_toolbox(None, ["zoom"], limits()), family) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        (reply,) = play(dialogue, call("zoom", box=box))
        (image,) = reply.observation.images
        assert image.views[0].min() == 255  # nothing but the white square
        assert int(family.is_placeholder(reply.observation.token_ids_L).sum()) == family.feature_count(image.plan)
        assert dialogue.end().failure is None


def test_a_family_that_does_not_document_its_boxes_needs_the_recipes_word(tiny_checkpoints):
    with pytest.raises(RecipeError, match="zoom given, and gemma3 does not document how it writes boxes; set data"):
        dialogues_of(load_toolbox(None, ["zoom"], limits()), family_of(tiny_checkpoints["gemma3"]))


def test_a_text_only_model_has_tools_of_text(tmp_path, write):
    family = family_of(save_generic_checkpoint(GENERIC["qwen3"], tmp_path / "model"))
    with pytest.raises(RecipeError, match=r"zoom given, and.*pictures; remove them"):
        dialogues_of(load_toolbox(None, ["zoom"], limits()), family)
    path = write("""
        from PIL import Image

        def text(): return "<image> is a mark"
        def picture(): return Image.new("RGB", (56, 56))
        """)
    schemas = tuple({"type": "function", "function": {"name": name}} for name in ("text", "picture"))
    code = UserCode(environment=None, functions=(f"{path}:text", f"{path}:picture"))
    with dialogues_of(Toolbox(code=code, schemas=schemas), family) as dialogues:
        (dialogue,) = dialogues.open(prompt_encoder(family, DATA)(make_row("row", "Where?", 0), 0), [0])
        text, picture = play(dialogue, call("text"), call("picture"))
        assert text.turn.answer == "< image> is a mark" and picture.observation is None
        assert "does not read pictures" in dialogue.end().failure

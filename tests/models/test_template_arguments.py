"""Variables of chat templates: in rows, in prompts, in an export. Those that would change nothing are refused."""

import json
import shutil

import pytest
from jinja2 import Environment

from tests.tiny_models import save_tiny_checkpoint
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.data.encoding import row_images
from tiercel.errors import ModelError
from tiercel.models.families.loading import family_of, load_family
from tiercel.models.prompts import encode_prompt
from tiercel.models.template_arguments import variables_of, with_arguments
from tiercel.models.weights.saving import write_companions
from tiercel.types import Message, Row

THINKS = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def test_a_variable_has_its_value_unless_it_is_given_otherwise():
    template = with_arguments(
        "{{ effort }} {{ enable_thinking }} {{ many }}", {"effort": 'l"ow', "enable_thinking": False}
    )
    rendered = Environment().from_string(template)
    assert rendered.render(many=2) == 'l"ow False 2'
    assert rendered.render(effort="high", many=2) == "high False 2"
    assert with_arguments("{{ x }}", {}) == "{{ x }}"


def test_variables_are_those_that_the_template_reads():
    template = (
        "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if tall %}{{ bos_token }}"
        "{% endif %}{% set own = 1 %}{{ own }}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ thinking_budget }}"
    )
    assert variables_of(template) == {"tall", "thinking_budget"}
    with pytest.raises(ModelError, match="not valid Jinja"):
        variables_of("{% if %}")


@pytest.mark.parametrize(
    "arguments, part", [({"enable_thinkin": False}, "enable_thinkin"), ({"messages": 1}, "messages")]
)
def test_a_variable_that_the_template_does_not_read_is_refused(arguments, part):
    with pytest.raises(ModelError, match=rf"data\.template_arguments\.{part}.*enable_thinking"):
        with_arguments("{{ messages }}{{ enable_thinking }}", arguments)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose template can leave thinking out, as Qwen3's does."""
    path = save_tiny_checkpoint("qwen2_5_vl", tmp_path / "model")
    (file,) = path.glob("chat_template*")
    text = file.read_text()
    own = json.loads(text)["chat_template"] if file.suffix == ".json" else text
    (tmp_path / "thinks.jinja").write_text(own + "{%- if add_generation_prompt %}" + THINKS + "{%- endif %}")
    return path


def test_prompts_and_exports_have_it(checkpoint, tmp_path):
    data = {"template": str(tmp_path / "thinks.jinja"), "template_arguments": {"enable_thinking": False}}
    recipe = grpo_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", data=data)
    row = Row(id="r", messages=(Message(role="user", content="Which?"),), columns={}, file="f", line=1)
    family = family_of(recipe)
    prompt = encode_prompt(family, row, 0, row_images(family, recipe.data, row), system=None, max_prompt_tokens=200)
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"template_arguments": {}})})
    other = encode_prompt(family_of(plain), row, 0, (), system=None, max_prompt_tokens=200)
    assert prompt.text.startswith(other.text) and not other.text.endswith("</think>\n\n")
    (tmp_path / "exported").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "exported")
    write_companions(family, tmp_path / "exported")
    family = load_family(recipe.model.model_copy(update={"path": str(tmp_path / "exported")}))
    assert encode_prompt(family, row, 0, (), system=None, max_prompt_tokens=200).text == prompt.text

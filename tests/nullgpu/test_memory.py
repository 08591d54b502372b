"""The plan of a full-size model is within 5 % of what PyTorch's own allocator takes."""

import json

import pytest

from benchmarks.gpu.models import MODELS, make_config
from tests.nullgpu.card import on_card
from tests.nullgpu.shapes import GROUP, GROUP_TOKENS
from tests.planning.test_memory import recipe_of
from tiercel.planning.memory import CONTEXT_BYTES, Layout, RankMemory, rank_memory
from tiercel.planning.options import measure, study

pytestmark = pytest.mark.nullgpu
GROUPS = 2  # of a microbatch
LEARNERS = (
    {"compile": True},
    {"compile": True, "gradient_checkpointing": "full"},
    {"compile": False},
)


def planned(model: str, learner: dict, directory) -> RankMemory:
    """Plan the learner alone."""
    make_config(MODELS[model]).save_pretrained(directory)
    tokens = GROUPS * GROUP_TOKENS
    changes = {
        "data": {"max_prompt_tokens": GROUP.prompt_tokens},
        "rollout": {"max_new_tokens": GROUP.completion_tokens, "group_size": GROUP.group_size},
        "learner": {"max_tokens_per_microbatch": tokens, **learner},
    }
    subject = study(recipe_of(directory, changes), None)
    layout = Layout(strategy="single", ranks=1, tokens=tokens, on_gpu=True)
    return rank_memory(subject.recipe, subject.sizes, measure(subject), None, layout)


@pytest.mark.parametrize("model", ["3b", "7b"])
@pytest.mark.parametrize("learner", LEARNERS, ids=json.dumps)
def test_the_plan_is_within_a_twentieth(tmp_path, model, learner):
    plan = planned(model, learner, tmp_path)
    (found,) = on_card("h100", "memory", model, json.dumps(learner), str(GROUPS))
    for phase in ("learn", "update"):
        tensors = plan.phases[phase] - plan.parts[phase]["fragmentation"] - CONTEXT_BYTES
        assert tensors == pytest.approx(found[phase]["allocated"], rel=0.05), phase
    held = plan.phases["learn"] - CONTEXT_BYTES
    assert found["learn"]["reserved"] <= held  # fragmentation is within what is assumed

"""Opening the teacher of a recipe: a checkpoint that every rank holds, or one that a server computes."""

from pathlib import Path

from tiercel.config.schema import GrpoRecipe
from tiercel.devices import training_device
from tiercel.distributed.ranks import Ranks
from tiercel.errors import ModelError
from tiercel.models.families.base import Family
from tiercel.models.policy import load_for_inference
from tiercel.packing.forward_equivalence_check import prove_where_needed
from tiercel.runs.progress import waiting
from tiercel.training.distillation.served_teacher import ServedTeacher, open_served, recipe_of_teacher
from tiercel.training.distillation.teacher_term import LocalTeacher, Teaching, require_same_vocabulary, teacher_encoder
from tiercel.training.policy_passes import passes_for_inference


def open_teacher(recipe: GrpoRecipe, policy: Family, ranks: Ranks) -> Teaching | None:
    """Load the recipe's teacher; None if it has none. Raises ModelError if its tokenizer differs from the policy's."""
    section = recipe.taught_by
    if section is None:
        return None
    chosen = recipe_of_teacher(recipe, section)
    told_by: LocalTeacher | ServedTeacher
    if section.url is not None:
        told_by = open_served(recipe, section, ranks)
        ranks.run_on_first(told_by.require_answer)
        family = told_by.family
    else:
        with waiting(f"loading the teacher {section.path}"):
            adapter = None if section.adapter is None else Path(section.adapter)
            model = load_for_inference(chosen, training_device(), adapter)
            prove_where_needed(model)
        family = model.family
        words = min(family.vocabulary_size, policy.vocabulary_size)
        told_by = LocalTeacher(section=section, passes=passes_for_inference(model, chosen, ranks), words=words)
    require_same_vocabulary(family, policy)
    encode = teacher_encoder(section, chosen.data, family, policy)
    if encode is not None and recipe.rollout.has_turns:
        raise ModelError(
            f"{section.path}: this teacher makes different tokens or pixels from a row than the policy, but turns "
            "with tools or an environment follow the policy's own prompt; use a teacher of the same family and "
            "processor"
        )
    return Teaching(section=section, told_by=told_by, encode=encode, ranks=ranks)

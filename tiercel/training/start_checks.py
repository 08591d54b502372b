"""Checks of the packages and of the user's own functions that a recipe needs, made before anything is read."""

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tiercel.algorithms.section import load_own_functions
from tiercel.config.conflicts.rewards import unlearnt_rewards
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config.tracker_packages import require_packages
from tiercel.devices import training_device
from tiercel.distributed.strategies.optimizer import parameter_groups, require_optimizer
from tiercel.errors import EnvironmentProblem, ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import random_picture
from tiercel.models.layers.experts import mixtures
from tiercel.models.layers.quantized import loading_options, require_package, stored_quantization
from tiercel.models.policy import load_for_inference, make_trainable, weights_dtype
from tiercel.models.weights.adapters import has_no_effect
from tiercel.models.weights.checkpoint_files import ADAPTER_CONFIG, named_few, read_config, read_json
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import name_of_base
from tiercel.packing.pass_options import chosen_form
from tiercel.rollout.local.engine import require_decodable
from tiercel.training.distillation.served_teacher import recipe_of_teacher
from tiercel.training.distillation.teacher_term import require_same_vocabulary, teacher_encoder
from tiercel.training.policy_passes import require_whole_rows


def require_installed(recipe: BaseRecipe) -> None:
    """Load the user's own loss and advantage. Raises RecipeError if one cannot be loaded, and EnvironmentProblem if the
    recipe names a strategy or an engine whose package is not installed."""
    if isinstance(recipe, GrpoRecipe):
        load_own_functions(recipe.algorithm)
    if recipe.model.quantize is not None:
        require_package("model.quantize")
    if not recipe.optim.is_of_torch:
        require_package("optim.name")
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    for key, kind, instead in (
        ("train.strategy", recipe.train.strategy_kind, "fsdp2, which needs nothing installed"),
        ("rollout.engine", engine, "local"),
    ):
        if kind is not None and kind.package is not None and find_spec(kind.package) is None:
            raise EnvironmentProblem(
                f"{key}: {kind.name} needs the package {kind.package}; pip install {kind.package}, or use {instead}"
            )


def missing_packages(recipe: BaseRecipe) -> list[EnvironmentProblem]:
    """Return what must be installed for the recipe: for its trackers, and the first of the rest. Raises RecipeError if
    a function of the user's own cannot be loaded."""
    found = []
    for require in (partial(require_packages, recipe.trackers), partial(require_installed, recipe)):
        try:
            require()
        except EnvironmentProblem as error:
            found.append(error)
    return found


META = torch.device("meta")
PICTURE = (112, 84)  # (width, height) of the picture that is computed
TOKENS = 4


def rehearse(recipe: BaseRecipe, family: Family) -> list[str]:
    """Read headers and configs of the checkpoint, the adapter and a teacher, and put them together as the run does on
    this machine. Return what a person should know about them. Raises ModelError, EnvironmentProblem or RecipeError if
    they do not fit together."""
    device = training_device()
    require_optimizer(recipe.optim, device)
    path = family.checkpoint.path
    if stored_quantization(read_config(Path(path)), path):  # its shapes are those of packed weights
        return _told_of_adapter(recipe, family)
    if find_spec("bitsandbytes") is not None:  # `check` reports missing packages itself
        loading_options(family, recipe.model.quantize, weights_dtype(recipe), device, is_stored=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each tensor that has no memory to be copied to
        model = load_weights(family, weights_dtype(recipe), META)
        left_over = model.left_over
        _compute(family, model)
        with META:
            policy = make_trainable(family, model, _unstarted(recipe), META)
        parameter_groups(policy, recipe.optim)
        config: Any = family.language_model(model).config
        obstacle = family.sharing_obstacle(config)
        form = chosen_form(recipe.learner.form, device, obstacle, in_parts=recipe.train.context_parallel > 1)
        require_whole_rows(recipe, form)
        if isinstance(recipe, GrpoRecipe):
            if recipe.rollout.engine_kind.shares_weights:
                require_decodable(family, config)
            _rehearse_teacher(recipe, family)
    names = named_few(left_over)
    told = f"the files have weights for parts that the architecture does not have; they are ignored: {names}"
    unlearnt = unlearnt_rewards(recipe) if isinstance(recipe, GrpoRecipe) else []
    return [*([told] if left_over else []), *unlearnt, *_told_of_adapter(recipe, family)]


def _told_of_adapter(recipe: BaseRecipe, family: Family) -> list[str]:
    """Report an adapter that has no effect yet, and one that names another base model than the recipe does."""
    if recipe.lora is None or recipe.lora.init is None:
        return []
    untrained = (
        f"every B matrix of {recipe.lora.init} is 0, so this adapter changes nothing: it was saved before its first "
        "update, or its training did not reach it"
    )
    return [*([untrained] if has_no_effect(Path(recipe.lora.init)) else []), *_told_of_origin(recipe, family)]


def _told_of_origin(recipe: BaseRecipe, family: Family) -> list[str]:
    assert recipe.lora is not None and recipe.lora.init is not None
    made_for = read_json(Path(recipe.lora.init) / ADAPTER_CONFIG).get("base_model_name_or_path")
    paths = (recipe.model.path, family.checkpoint.path)
    here = {Path(each).name for path in paths for each in (path, name_of_base(path))}
    if not isinstance(made_for, str) or not made_for or Path(made_for).name in here:
        return []
    return [
        f"{recipe.lora.init} says that it was made for {made_for}; this model is {recipe.model.path}, and nothing in "
        "its weights tells whether they are the same"
    ]


def _compute(family: Family, model: HuggingFaceModel) -> None:
    """Compute the shapes of a picture's features and of four tokens. Raises ModelError if they do not fit. What needs
    values, and not shapes alone, is left to the run."""
    try:
        if family.image_marker is not None and not family.needs_proof:
            image = family.encode_image(random_picture(PICTURE, 0))
            (features,) = family.vision_features(model, [image])
            if len(features) != (places := family.feature_count(image.plan)):
                raise ValueError(
                    f"the image processor makes {places} places for a picture of {PICTURE[0]} x {PICTURE[1]} pixels, "
                    f"but the model {len(features)} features"
                )
        decoder: Any = family.language_model(model)
        if not mixtures(model):
            shape = (family.position_dimensions, 1, TOKENS) if family.position_dimensions > 1 else (1, TOKENS)
            decoder(
                inputs_embeds=torch.zeros(1, TOKENS, decoder.config.hidden_size, device=META, dtype=model.dtype),
                position_ids=torch.zeros(shape, dtype=torch.int64, device=META),
                attention_mask=torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=META),
                use_cache=False,
            )
    except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return
        raise ModelError(
            f"{family.checkpoint.path}: its config.json and its preprocessor_config.json do not match, or "
            f"config.json does not belong to the weights: {error}"
        ) from error


def _unstarted(recipe: BaseRecipe) -> BaseRecipe:
    """Return the recipe without a start that is computed from the weights themselves."""
    if recipe.lora is None or recipe.lora.start is None:
        return recipe
    return recipe.with_values({"lora.start": None})


def _rehearse_teacher(recipe: GrpoRecipe, policy: Family) -> None:
    section = recipe.taught_by
    if section is None or section.url is not None:
        return
    chosen = recipe_of_teacher(recipe, section)
    family = load_for_inference(chosen, META, None if section.adapter is None else Path(section.adapter)).family
    require_same_vocabulary(family, policy)
    teacher_encoder(section, chosen.data, family, policy)

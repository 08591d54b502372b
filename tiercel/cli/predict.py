"""`tiercel predict`: one prompt, one greedy completion."""

from collections.abc import Sequence
from pathlib import Path

from tiercel.cli.evaluate import trained_weights
from tiercel.config.schema import Data, GrpoRecipe, Model, Rollout, SftRecipe, Train
from tiercel.data.images import decode
from tiercel.errors import RecipeError
from tiercel.models.policy import load_for_inference
from tiercel.models.prompts import encode_prompt
from tiercel.models.vision import VisionStore
from tiercel.rollout.local import LocalSampler
from tiercel.rollout.sampler import greedy_params
from tiercel.runs.directory import load_run_recipe, require_no_redaction
from tiercel.training.setup import training_device
from tiercel.types import ImageRoots, ImageSource, Message, Row


def predict(model: str, prompt: str, images: Sequence[Path], adapter: Path | None, max_new_tokens: int) -> str:
    """The completion of a model or of a run's newest checkpoint, with the run's system message and template."""
    recipe = _recipe(model, adapter)
    recipe, adapter = recipe if adapter is None else (recipe[0], adapter)
    marks = prompt.count("<image>")
    if marks not in (0, len(images)):
        raise RecipeError([f"--image: {len(images)} given for {marks} <image> marks in the prompt"], source="predict")
    for image in images:
        if not image.is_file():
            raise RecipeError([f"--image: {image} is no file"], source="predict")
    content = prompt if marks else "<image>" * len(images) + prompt
    policy = load_for_inference(recipe, training_device(), adapter)
    row = Row(
        id="predict",
        messages=(Message(role="user", content=content),),
        images=tuple(ImageSource(path=image.name) for image in images),
        columns={},
        file="command line",
        line=1,
    )
    encoded = []
    for image in images:
        roots = ImageRoots(base=str(image.parent))
        picture = decode(ImageSource(path=image.name), roots, recipe.data.max_image_pixels)
        encoded.append(policy.family.encode_image(picture))
    limit = recipe.data.max_prompt_tokens
    request = encode_prompt(policy.family, row, 0, encoded, system=recipe.data.system, max_prompt_tokens=limit)
    rollout = recipe.rollout if isinstance(recipe, GrpoRecipe) else Rollout()
    sampler = LocalSampler(policy, VisionStore(policy, 0), prepacked_bytes=rollout.prepacked_bytes)
    (group,) = sampler.sample([request], greedy_params(Rollout(max_new_tokens=max_new_tokens)), [0])
    return group.completions[0].text


def _recipe(model: str, adapter: Path | None):
    """The recipe that says how prompts are made, and the adapter of a run."""
    path = Path(model)
    if not (path / "config.yaml").is_file():
        plain = SftRecipe(
            model=Model(path=model, dtype="float32"), data=Data(train="-"), train=Train(steps=1), output="-"
        )
        return plain, adapter
    recipe = load_run_recipe(path)
    require_no_redaction(recipe, path)
    weights, trained = trained_weights(path, recipe)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": weights})}), trained

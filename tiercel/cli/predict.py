"""`tiercel predict`: complete one prompt greedily."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tiercel.cli.trained_weights import CheckpointChoice, trained_weights, with_weights
from tiercel.config import Recipe, RewardRecipe
from tiercel.config.schema import GrpoRecipe, Rollout
from tiercel.data.encoding import row_images
from tiercel.devices import training_device
from tiercel.errors import RunError
from tiercel.models.policy import load_for_inference
from tiercel.models.prompts import encode_prompt
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.proof import prove_where_needed
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import greedy_params
from tiercel.runs.recipe import is_run
from tiercel.training.grpo.policy_sync import Completer, open_dialogues
from tiercel.types import Completion, ImageRoots, ImageSource, Message, Row


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Print the completion of a model or of a run's checkpoint, with the run's system message and template."""
    if isinstance(recipe, RewardRecipe):
        raise RunError(
            f"{arguments.model} is a reward model, which writes nothing; `tiercel eval {arguments.model}` shows how it "
            "ranks held-out pairs"
        )
    adapter: Path | None = arguments.adapter
    if is_run(path := Path(arguments.model)):
        trained = trained_weights(path, recipe, CheckpointChoice.of(arguments))
        recipe, adapter = with_weights(recipe, trained), adapter or trained.adapter
    print(predict(recipe, arguments.prompt, arguments.image, adapter, arguments.max_new_tokens))


def predict(recipe: Recipe, prompt: str, images: Sequence[Path], adapter: Path | None, max_new_tokens: int) -> str:
    """Return the greedy completion of the recipe's model with an adapter."""
    content = prompt if "<image>" in prompt else "<image>" * len(images) + prompt
    policy = load_for_inference(recipe, training_device(), adapter)
    prove_where_needed(policy)
    row = Row(
        id="predict",
        messages=(Message(role="user", content=content),),
        images=tuple(ImageSource(path=str(image.absolute())) for image in images),
        columns={},
        file="command line",
        line=1,
        image_roots=ImageRoots(more=tuple(str(image.absolute().parent) for image in images)),
    )
    encoded = row_images(policy.family, recipe.data, row)
    limit = recipe.data.max_prompt_tokens
    rollout = recipe.rollout if isinstance(recipe, GrpoRecipe) else Rollout()
    sampler = LocalSampler(policy, VisionStore(policy, 0), prepacked_bytes=rollout.prepacked_bytes)
    with open_dialogues(recipe, policy.family, print) as dialogues:
        completer = Completer(sampler=sampler, dialogues=dialogues)
        request = encode_prompt(policy.family, row, 0, encoded, system=recipe.data.system, max_prompt_tokens=limit)
        params = greedy_params(Rollout(max_new_tokens=max_new_tokens))
        (group,) = completer.sample(completer.begun([request]), params, [0])
    return _in_words(group.completions[0])


def _in_words(completion: Completion) -> str:
    """Write a completion, turn by turn where there are several."""
    if completion.trajectory is None:
        return completion.text
    lines = []
    for turn in completion.trajectory.turns:
        lines += [turn.text] if turn.answer is None else [turn.text, f"[came back] {turn.answer}"]
    return "\n".join(lines)

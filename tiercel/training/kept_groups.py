"""Groups of an update that was not finite, made again from what the run kept of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from tiercel.config import GrpoRecipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import RowTable, read_training_rows
from tiercel.errors import DataError
from tiercel.learner.batch import AdvantageGroup, advantage_group
from tiercel.models.family import Family
from tiercel.runs.group_records import CompletionRecord, GroupRecord
from tiercel.training.finite import KEPT_GROUPS
from tiercel.training.turns import open_dialogues
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Trajectory


def kept_groups(recipe: GrpoRecipe, family: Family, directory: Path) -> list[AdvantageGroup]:
    """Make the groups that were learnt from. Raises DataError where the data have changed since."""
    table = read_training_rows(recipe.data, "grpo")
    learnt = []
    for line in (directory / KEPT_GROUPS).read_text(encoding="utf-8").splitlines():
        record = GroupRecord.from_json(json.loads(line))
        if completions := [each for each in record.completions if each.advantage is not None]:
            learnt.append((record, completions))
    prompts = _prompts(family, recipe, table, [record for record, _ in learnt])
    return [
        advantage_group(
            prompt,
            [_completion(each, prompt, family, directory) for each in completions],
            [each.advantage for each in completions],
        )
        for prompt, (_, completions) in zip(prompts, learnt, strict=True)
    ]


def _prompts(
    family: Family, recipe: GrpoRecipe, table: RowTable, records: Sequence[GroupRecord]
) -> list[EncodedPrompt]:
    """Encode the records' prompts, with what an environment adds to them."""
    encode, order = prompt_encoder(family, recipe.data), table.order(recipe.train.seed, recipe.data)
    prompts = []
    for record in records:
        row = table.rows[order.row(record.index)]
        if row.id != record.id:
            raise DataError(f"data.train: {table.file} has changed since; row {record.id} is not where it was")
        prompts.append(encode(row, record.index))
    with open_dialogues(recipe, family, lambda text: None) as dialogues:
        return prompts if dialogues is None else dialogues.prompts_of(prompts)


def _completion(record: CompletionRecord, prompt: EncodedPrompt, family: Family, directory: Path) -> Completion:
    """Make the completion without the engine's logprobs, which rollouts/ does not keep; importance weights are 1."""
    token_ids_L = torch.tensor(record.token_ids, dtype=torch.int64)
    pictures = directory.parent.parent / "images"
    return Completion(
        token_ids_L=token_ids_L,
        logprobs_L=torch.full((len(token_ids_L),), math.nan),
        text=record.text,
        is_truncated=record.is_truncated,
        seed=record.seed,
        trajectory=_trajectory(record, prompt, family, pictures) if record.turns else None,
    )


def _trajectory(record: CompletionRecord, prompt: EncodedPrompt, family: Family, pictures: Path) -> Trajectory:
    """Make a trajectory of its turns and of the pictures that the run saved. Raises DataError for a picture that cannot
    be made again from what was saved."""
    token_ids_L = torch.tensor(record.token_ids, dtype=torch.int64)
    is_sampled_L = torch.zeros(len(token_ids_L), dtype=torch.bool)
    for turn in record.turns:
        is_sampled_L[turn.start : turn.stop] = True
    images = [_saved_picture(family, pictures, image.sha256) for turn in record.turns for image in turn.images]
    plans = [image.plan for image in (*prompt.images, *images)]
    start = len(prompt.token_ids_P)
    return Trajectory(
        is_sampled_L=is_sampled_L,
        positions_DL=family.positions(torch.cat([prompt.token_ids_P, token_ids_L]), plans)[:, start:],
        images=tuple(images),
        picture_spans=family.picture_spans(token_ids_L),
        turns=(),
        outcome=None,
        failure=None,
    )


def _saved_picture(family: Family, pictures: Path, sha256: str) -> EncodedImage:
    with Image.open(pictures / f"{sha256}.png") as picture:
        image = family.encode_image(picture.convert("RGB"))
    if image.sha256 != sha256:
        raise DataError(f"{family.name}: images/{sha256}.png, which a tool answered, cannot be cut into tiles again")
    return image

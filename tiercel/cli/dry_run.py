"""Score a made-up completion of a real row before a run, with the recipe's environment and its rewards."""

from collections.abc import Sequence

import torch
from rich.console import Console

from tiercel.config import GrpoRecipe
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.errors import TrainingError
from tiercel.models.family import Family
from tiercel.rewards.entry import TruthReward
from tiercel.rollout.trajectory import TrajectoryBuilder
from tiercel.scoring.scorer import Scorer, applies
from tiercel.types import Completion, EncodedPrompt, Group, ImagePlan, Row, Sample, SampleImage

MADE_UP = "<answer>0</answer>"


def dry_run(
    recipe: GrpoRecipe, family: Family, dialogues: EnvironmentDialogues | None, row: Row, console: Console
) -> None:
    """Ask the environment and every reward once. Raises TrainingError where one fails, as it would in training."""
    prompt = prompt_encoder(family, recipe.data)(row, 0)
    token_ids = [*family.tokenizer(MADE_UP, add_special_tokens=False)["input_ids"], family.checkpoint.end_token_ids[0]]
    completion = Completion(
        token_ids_L=torch.tensor(token_ids),
        logprobs_L=torch.zeros(len(token_ids)),
        text=MADE_UP,
        is_truncated=False,
        seed=0,
    )
    if dialogues is not None:
        (prompt,) = dialogues.prompts_of([prompt])
        completion = _answered(completion, prompt, family, dialogues)
        assert completion.trajectory is not None
        if completion.trajectory.failure is not None:
            raise TrainingError(completion.trajectory.failure)
    with Scorer(recipe.rewards, recipe.reliability, family.coordinate_space) as scorer:
        (scored,) = scorer.score([Group(prompt=prompt, completions=(completion,), policy_version=0)])
    for name, value in scored.completions[0].rewards.items():
        if value.failure is not None:
            raise TrainingError(f"reward {name} failed on row {row.id}:\n{value.failure}")
        shown = "does not apply" if value.value is None else f"{value.value:g}"
        console.print(f"reward {name}: {shown} for a made-up completion of row {row.id}")


def require_answers(recipe: GrpoRecipe, family: Family, row: Row, plans: Sequence[ImagePlan]) -> None:
    """Raise DataError where the rewards that compare with the row's right answer cannot read it. Rewards that take time
    are not asked."""
    images = tuple(
        SampleImage(path=None, original_size=plan.original_size, processed_size=plan.processed_size) for plan in plans
    )
    sample = Sample(
        id=row.id,
        prompt="",
        completion="",
        token_count=0,
        is_truncated=False,
        answer=row.answer,
        columns=row.columns,
        images=images,
        coordinate_space=family.coordinate_space,
    )
    for reward in recipe.rewards:
        if isinstance(reward, TruthReward) and not reward.takes_time and applies(reward.where, sample):
            reward.score(sample)


def _answered(
    completion: Completion, prompt: EncodedPrompt, family: Family, dialogues: EnvironmentDialogues
) -> Completion:
    """Make the completion the first turn of a trajectory."""
    (dialogue,) = dialogues.open(prompt, [0])
    token_ids = completion.token_ids_L.tolist()
    builder = TrajectoryBuilder(family, prompt, dialogue, dialogues.limits, len(token_ids), completion.seed)
    reply = builder.add_turn(token_ids, completion.logprobs_L.tolist(), is_truncated=False)
    assert reply is not None
    builder.add_reply(reply.result())
    return builder.completion()

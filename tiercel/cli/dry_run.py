"""Scoring of a made-up completion of a real row before a run, with the recipe's environment and rewards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache

import torch
from rich.console import Console

from tiercel.config import GrpoRecipe, Recipe
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.errors import DataError, TrainingError
from tiercel.models.families.base import Family
from tiercel.rewards.base import TruthReward, is_meant
from tiercel.rewards.external import ByCall, Math
from tiercel.rewards.runtime.batches import BatchReward, batch_reward
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rewards.shape import open_tag
from tiercel.rollout.trajectory import TrajectoryBuilder
from tiercel.types import Completion, EncodedPrompt, Group, ImagePlan, RewardValue, Row, Sample, SampleImage

MADE_UP = "<answer>0</answer>"
MORE_ROWS = 7  # further rows, spread over all, for a user's function that does not apply to the first one


def dry_run(
    recipe: GrpoRecipe, family: Family, dialogues: EnvironmentDialogues | None, rows: Sequence[Row], console: Console
) -> None:
    """Ask the environment and every reward about the first row, about the first row of each environment if there are
    several, and about a few more rows if a function of the user's does not apply to the first. Raises TrainingError
    where one fails, as it would in training."""
    with Scorer(recipe.rewards, recipe.reliability, family.coordinate_space) as scorer:
        first, *of_others = _firsts(family, rows)
        values = _asked(recipe, family, dialogues, first, scorer)
        for row in of_others:
            _asked(recipe, family, dialogues, row, scorer)
            console.print(f"environment {family.environment_of(row)}: answers a made-up completion of row {row.id}")
        own = [name for name, reward in zip(scorer.names, recipe.rewards, strict=True) if isinstance(reward, ByCall)]
        silent = [name for name in own if values[name].value is None]
        more = rows[1 :: max(1, len(rows) // MORE_ROWS)][:MORE_ROWS] if silent and dialogues is None else ()
        others = [_asked(recipe, family, dialogues, row, scorer) for row in more]
    for name, value in values.items():
        shown = "does not apply" if value.value is None else f"{value.value:g}"
        if name in silent and others and all(other[name].value is None for other in others):
            console.print(f"reward {name}: does not apply for a made-up completion of any of {len(others) + 1} rows")
            continue
        console.print(f"reward {name}: {shown} for a made-up completion of row {first.id}")


def _firsts(family: Family, rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each environment; one row if all have the same."""
    if not family.tools_by_environment:
        return list(rows[:1])
    firsts: dict[str | None, Row] = {}
    for row in rows:
        with suppress(DataError):  # the scan has said that a row is rejected
            firsts.setdefault(family.environment_of(row), row)
    return list(firsts.values())


def _asked(
    recipe: GrpoRecipe, family: Family, dialogues: EnvironmentDialogues | None, row: Row, scorer: Scorer
) -> Mapping[str, RewardValue]:
    prompt = prompt_encoder(family, recipe.data)(row, 0)
    text = made_up(prompt.opened)
    token_ids = [*family.tokenizer(text, add_special_tokens=False)["input_ids"], family.checkpoint.end_token_ids[0]]
    completion = Completion(
        token_ids_L=torch.tensor(token_ids),
        logprobs_L=torch.zeros(len(token_ids)),
        text=text,
        is_truncated=False,
        seed=0,
    )
    if dialogues is not None:
        (prompt,) = dialogues.prompts_of([prompt])
        completion = _answered(completion, prompt, family, dialogues)
        assert completion.trajectory is not None
        if completion.trajectory.failure is not None:
            raise TrainingError(completion.trajectory.failure)
    (scored,) = scorer.score([Group(prompt=prompt, completions=(completion,), policy_version=0)])
    for name, value in scored.completions[0].rewards.items():
        if value.failure is not None:
            raise TrainingError(f"reward {name} failed on row {row.id}:\n{value.failure}")
    return scored.completions[0].rewards


def made_up(opened: str) -> str:
    """Make a well-formed completion to follow what the chat template opened: a thought is closed first."""
    tag = open_tag(opened)
    return MADE_UP if tag is None else f"</{tag}>\n\n{MADE_UP}"


Readers = Sequence[tuple[Math, Callable[[str, Sample], str | None]]]  # of right answers, each in its own process


@contextmanager
def truth_readers(recipe: Recipe) -> Iterator[Readers]:
    """Start the processes that read the right answers of the reward `math`, as in training. A reward whose package is
    missing gets none."""
    rewards = recipe.rewards if isinstance(recipe, GrpoRecipe) else ()
    readers = []
    with ExitStack() as processes:
        for reward in rewards:
            if isinstance(reward, Math) and not list(reward.missing()):
                batch = batch_reward(reward, recipe.reliability)
                assert batch is not None
                processes.callback(batch.close)
                batch.start()
                readers.append((reward, _reader(batch)))
        yield readers


def _reader(batch: BatchReward) -> Callable[[str, Sample], str | None]:
    """Return a function that says why a right answer cannot be read. Equal answers of many rows are read once."""
    asked: list[Sample] = []

    @lru_cache(maxsize=4096)
    def fault(written: str) -> str | None:
        (value,) = batch.score(asked)
        return value.failure

    def ask(written: str, sample: Sample) -> str | None:
        asked[:] = [sample]
        return fault(written)

    return ask


def require_answers(
    recipe: GrpoRecipe, family: Family, row: Row, plans: Sequence[ImagePlan], readers: Readers = ()
) -> None:
    """Raise DataError if a reward that compares with the row's right answer cannot read it. Slow rewards are not asked,
    except through `readers`."""
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
        answer_image=row.answer_visual,
        answer_space=row.answer_space,
    )
    for reward in recipe.rewards:
        if isinstance(reward, TruthReward) and not reward.takes_time and is_meant(reward, row.columns):
            reward.score(sample)
    for math, ask in readers:
        truth = math.truth(sample) if is_meant(math, row.columns) else None
        if truth is not None and (fault := ask(repr(truth.value), sample)) is not None:
            raise DataError(f"row {row.id}, column {truth.column}: {_last_line(fault)}", field=truth.column)


def _last_line(fault: str) -> str:
    """Return the last line of a reward's failure, without its traceback."""
    return fault.strip().rpartition("\n")[2].removeprefix("ValueError: ")


def _answered(
    completion: Completion, prompt: EncodedPrompt, family: Family, dialogues: EnvironmentDialogues
) -> Completion:
    """Make the completion the first turn of a trajectory, and add the environment's reply to it."""
    (dialogue,) = dialogues.open(prompt, [0])
    token_ids = completion.token_ids_L.tolist()
    builder = TrajectoryBuilder(family, prompt, dialogue, dialogues.limits, len(token_ids), completion.seed)
    reply = builder.add_turn(token_ids, completion.logprobs_L.tolist(), is_truncated=False)
    assert reply is not None
    builder.add_reply(reply.result())
    return builder.completion()

"""Scoring of a made-up completion of a real row before a run, with the recipe's environment and rewards."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import product

import torch
from rich.console import Console

from tiercel.config import GrpoRecipe, Recipe
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.errors import DataError, TrainingError
from tiercel.message_text import counted
from tiercel.models.families.base import Family
from tiercel.rewards.base import TruthReward, is_meant
from tiercel.rewards.external import ByCall, Math
from tiercel.rewards.runtime.batches import BatchReward, batch_reward
from tiercel.rewards.runtime.scorer import Scorer, reward_names
from tiercel.rewards.shape import open_tag
from tiercel.rollout.trajectory import TrajectoryBuilder
from tiercel.types import Completion, EncodedPrompt, Group, ImagePlan, RewardValue, Row, Sample, SampleImage

MADE_UP = "<answer>0</answer>"
OTHERS = ("Unclear.", "")  # what a model may write too
MOST_ROWS = 32  # spread over all, that functions of the user's are asked about
MOST_SHOWN = 5


def dry_run(
    recipe: GrpoRecipe,
    family: Family,
    dialogues: EnvironmentDialogues | None,
    rows: Sequence[Row],
    prompts: Sequence[EncodedPrompt],
    console: Console,
) -> None:
    """Ask the environment and every reward about `prompts`, those of `first_prompts`; without an environment, also
    functions of the user's about more rows and completions. Raises TrainingError if one fails, as it would in
    training."""
    with Scorer(recipe.rewards, recipe.reliability, family.coordinate_space) as scorer:
        silent = _try_own(recipe, family, rows, console) if dialogues is None else {}
        first, *of_others = prompts
        values = _asked(family, dialogues, first, scorer)
        for prompt in of_others:
            _asked(family, dialogues, prompt, scorer)
            name, row = family.environment_of(prompt.row), prompt.row
            console.print(f"environment {name}: answers a made-up completion of row {row.id}")
    for name, value in values.items():
        shown = "does not apply" if value.value is None else f"{value.value:g}"
        if name in silent:
            asked = f"made-up completions of {counted(silent[name], 'row')}"
            console.print(f"reward {name}: does not apply to {asked}, because it returned None; does it end by return?")
            continue
        console.print(f"reward {name}: {shown} for a made-up completion of row {first.row.id}")


def first_prompts(recipe: GrpoRecipe, family: Family, rows: Iterable[Row]) -> list[EncodedPrompt]:
    """Encode the first of the usable rows for each environment; one row if all have the same. Raises DataError if none
    can be encoded."""
    encode, firsts = prompt_encoder(family, recipe.data), dict[str | None, EncodedPrompt]()
    problem: DataError | None = None
    for row in rows:
        try:
            if (name := family.environment_of(row)) not in firsts:
                firsts[name] = encode(row, 0)
        except DataError as error:  # such as a picture that is cut short, which only --decode looks for
            problem = error
        if firsts and not family.tools_by_environment:
            break
    if not firsts:
        raise problem or DataError("no row can be used", field="messages")
    return list(firsts.values())


def _asked(
    family: Family, dialogues: EnvironmentDialogues | None, prompt: EncodedPrompt, scorer: Scorer
) -> Mapping[str, RewardValue]:
    completion = _completion(family, made_up(prompt.opened))
    if dialogues is not None:
        (prompt,) = dialogues.prompts_of([prompt])
        completion = _answered(completion, prompt, family, dialogues)
        assert completion.trajectory is not None
        if completion.trajectory.failure is not None:
            raise TrainingError(completion.trajectory.failure)
    (scored,) = scorer.score([Group(prompt=prompt, completions=(completion,), policy_version=0)])
    for name, value in scored.completions[0].rewards.items():
        if value.failure is not None:
            raise TrainingError(f"reward {name} failed on row {prompt.row.id}:\n{value.failure}")
    return scored.completions[0].rewards


def _completion(family: Family, text: str) -> Completion:
    token_ids = [*family.tokenizer(text, add_special_tokens=False)["input_ids"], family.checkpoint.end_token_ids[0]]
    return Completion(
        token_ids_L=torch.tensor(token_ids),
        logprobs_L=torch.zeros(len(token_ids)),
        text=text,
        is_truncated=False,
        seed=0,
    )


def _try_own(recipe: GrpoRecipe, family: Family, rows: Sequence[Row], console: Console) -> dict[str, int]:
    """Ask functions of the user's about rows spread over all, and about completions without an answer, and print where
    they fail and why. Returns the number of rows for those that apply to none. Raises TrainingError if one fails on
    more rows than reliability.max_failed_reward_fraction allows."""
    names = reward_names(recipe.rewards)
    own = {name: each for name, each in zip(names, recipe.rewards, strict=True) if isinstance(each, ByCall)}
    found: dict[str, list[tuple[str, str, RewardValue]]] = {name: [] for name in own}
    prompts = []
    for row in rows[:: -(-len(rows) // MOST_ROWS)] if own else ():
        with suppress(DataError):  # the scan has said that the row is rejected
            prompts.append(prompt_encoder(family, recipe.data)(row, 0))
    end = time.monotonic() + recipe.reliability.reward_timeout
    with Scorer(tuple(own.values()), recipe.reliability, family.coordinate_space) as scorer:
        for prompt, place in product(prompts, range(1 + len(OTHERS))):
            if time.monotonic() > end:  # slow, or hanging
                break
            text = (made_up(prompt.opened), *OTHERS)[place]
            # In a run a batch has several completions, and a function may return too few values for them.
            completions = (_completion(family, text),) * (1 if place else 2)
            group = Group(prompt=prompt, completions=completions, policy_version=0)
            values = scorer.score([group])[0].completions[0].rewards.values()
            for name, value in zip(own, values, strict=True):
                found[name].append((prompt.row.id, text, value))
    for name, asked in found.items():
        _tell_failures(name, asked, recipe.reliability.max_failed_reward_fraction, console)
    return {
        name: len({row for row, _, _ in asked})
        for name, asked in found.items()
        if asked and all(value.value is None for _, _, value in asked)
    }


def _tell_failures(name: str, asked: list[tuple[str, str, RewardValue]], limit: float, console: Console) -> None:
    failed = [(row, text, value.failure) for row, text, value in asked if value.failure is not None]
    if failed:
        console.print(f"reward {name}: failed on {len(failed)} of {len(asked)} made-up completions, such as")
    for row, text, failure in failed[:MOST_SHOWN]:
        console.print(f"  row {row}, completion {text!r}: {_reason(failure, row)}", markup=False)
    answered = [failure for _, text, failure in failed if text not in OTHERS]
    rows = sum(text not in OTHERS for _, text, _ in asked)
    if len(answered) > limit * rows:
        raise TrainingError(
            f"reward {name} failed on {len(answered)} of {rows} rows, more than "
            f"reliability.max_failed_reward_fraction = {limit:g} allows; the first:\n{answered[0]}"
        )


def _reason(failure: str, row: str) -> str:
    """Return the line of a failure that names the exception, without its traceback, and without the row, which the
    message has itself."""
    lines = failure.splitlines()
    found = next((line for line in lines[1:] if not line.startswith(" ")), lines[0])
    return found.partition(f"row {row}: ")[2] or found


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

"""What every training command does around its loop: ranks, run directory, errors in plain words, report."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from os.path import expanduser, isdir

import torch.distributed as dist

from tiercel.config import GrpoRecipe
from tiercel.config.conflicts.rewards import reward_models
from tiercel.config.loading import require_sound
from tiercel.config.schema import BaseRecipe, Recipe, Source
from tiercel.config.tracker_packages import require_packages
from tiercel.distributed.agreement import require_same_files, require_same_recipe
from tiercel.distributed.ranks import Ranks, joined_ranks
from tiercel.doctor.packages import blame_packages
from tiercel.errors import EnvironmentProblem, Terminated, TrainingError
from tiercel.message_text import first_line
from tiercel.models.weights.hub import resolve
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.reliability.card_faults import CardFault, card_fault, triton_errors
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.runs.directory import RunDirectory, open_run
from tiercel.training.finished_step import FinishedStep
from tiercel.training.grpo import loop as grpo
from tiercel.training.offline import loop as offline
from tiercel.training.process_guard import phase_limits
from tiercel.web.report import write_report

COLLECTIVE_PATIENCE = 2


def run_recipe(recipe: Recipe, heartbeat: Heartbeat) -> Generator[FinishedStep, None, None]:
    """Train in the recipe's run directory, alone or as one of the ranks that a launcher started, and write its
    report.html, unless a signal ends the run. Yield each step once it is recorded. `heartbeat` is the guarded one of
    this process. Raises TrainingError if memory runs out, and RecipeError for a recipe that a file could not hold."""
    require_sound(recipe)
    with launched_ranks(recipe, heartbeat) as ranks, ready_run(recipe, ranks) as run:
        fetch(recipe, ranks)
        heartbeat.begin("rows", 0)
        try:
            yield from steps_of(recipe, run)
        except Terminated as ended:
            if ended.is_by_caller:
                _report(run)
            raise
        _report(run)


def steps_of(recipe: Recipe, run: RunDirectory) -> Iterator[FinishedStep]:
    """Return the loop of the recipe's method."""
    return grpo.steps(recipe, run) if isinstance(recipe, GrpoRecipe) else offline.steps(recipe, run)


def _report(run: RunDirectory) -> None:
    """Write report.html on the first rank."""

    def write() -> None:
        run.require_held()
        write_report(run.path)

    run.ranks.heartbeat.begin("report", run.ranks.heartbeat.activity.step)
    run.ranks.run_on_first(write)


def fetch(recipe: BaseRecipe, ranks: Ranks) -> None:
    """Download what the recipe names on a hub, which shows its own progress and may take hours."""
    for source in checkpoints_of(recipe):
        if ranks.all_reduce_any(not isdir(expanduser(source.path))):  # a machine may lack the directory
            ranks.heartbeat.begin("download", 0)
        ranks.run_on_all(partial(resolve, source))


def checkpoints_of(recipe: BaseRecipe) -> list[Source]:
    """List the checkpoints that may come from a hub: the model, its teacher, and the models of the rewards."""
    taught_by = () if recipe.taught_by is None else (recipe.taught_by,)
    return [recipe.model, *taught_by, *reward_models(recipe)]


@contextmanager
def ready_run(recipe: Recipe, ranks: Ranks) -> Iterator[RunDirectory]:
    """Open the recipe's run directory, once the packages of its trackers were found."""
    ranks.run_on_first(lambda: require_packages(recipe.trackers))
    with open_run(recipe, ranks) as run, plain_failures(recipe):  # inside, so that the run records the plain words
        yield run


@contextmanager
def launched_ranks(recipe: Recipe, heartbeat: Heartbeat) -> Iterator[Ranks]:
    """Join the ranks that a launcher started, once they agree. Their failures are reported in plain words."""
    limit = COLLECTIVE_PATIENCE * max(phase_limits(recipe).values())  # reached only if no watchdog could act before
    with plain_failures(recipe), joined_ranks(limit, heartbeat) as ranks:
        if ranks.world_size > 1:
            heartbeat.begin("agree", 0)
            require_same_recipe(recipe, ranks)
            fetch(recipe, ranks)
            heartbeat.begin("agree", 0)
            require_same_files(recipe, ranks)
        yield ranks


@contextmanager
def plain_failures(recipe: BaseRecipe) -> Iterator[None]:
    """Turn memory errors, and collectives that another rank left, into TrainingError with a remedy, and what a card or
    its driver cannot do, and packages that do not fit together, into EnvironmentProblem."""
    try:
        yield
    except _explained() as error:
        if isinstance(error, ImportError) or "torchvision::" in str(error):
            blame_packages(error)
        if fault := card_fault(str(error)):
            raise EnvironmentProblem(f"{fault.meaning}: {_telling_line(error, fault)}\n{fault.remedy}") from error
        if is_out_of_memory(error):
            raise TrainingError(f"out of memory: {first_line(error)}\n{_less_memory(recipe)}") from error
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"a collective failed: {str(error).splitlines()[0]}\nusually because another rank ended, which says why; "
            "run the same command again to resume from the newest checkpoint"
        ) from error


def _explained() -> tuple[type[Exception], ...]:
    """Return the classes of the errors that may have plain words. It is called when one was raised, since Triton is
    imported late."""
    return (RuntimeError, ImportError, MemoryError, *triton_errors())


def _telling_line(error: Exception, fault: CardFault) -> str:
    """Return the line of an error's message where the fault's text begins."""
    text = str(error)
    found = fault.pattern.search(text)
    start = 0 if found is None else text.rfind("\n", 0, found.start()) + 1
    return text[start:].splitlines()[0].strip()


def _less_memory(recipe: BaseRecipe) -> str:
    """List the keys that reduce the memory."""
    learner = recipe.learner
    changes = [f"lower learner.max_tokens_per_microbatch ({learner.max_tokens_per_microbatch})"]
    if learner.gradient_checkpointing != "full":
        changes.append("set learner.gradient_checkpointing: full")
    if isinstance(recipe, GrpoRecipe) and recipe.rollout.engine_kind.shares_weights and recipe.rollout.prepacked_bytes:
        changes.append("on a CPU, set rollout.prepacked_bytes: 0")
    return ", or ".join(changes) + "; none of these changes the result except by rounding"

"""What every training command does around its loop: the run directory, memory errors in plain words, the report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from tiercel.config import GrpoRecipe, SftRecipe
from tiercel.config.schema import BaseRecipe
from tiercel.distributed.agreement import require_agreement
from tiercel.distributed.ranks import Ranks, joined_ranks
from tiercel.errors import TrainingError
from tiercel.report import write_report
from tiercel.runs.directory import RunDirectory, open_run

AnyRecipe = TypeVar("AnyRecipe", SftRecipe, GrpoRecipe)


def run_recipe(train: Callable[[AnyRecipe, RunDirectory], None], recipe: AnyRecipe) -> Path | None:
    """Train in the recipe's run directory, alone or as one of the ranks that a launcher started, write its report.html
    and return its path; None but on the first rank. Raises TrainingError where memory runs out."""
    with launched_ranks(recipe) as ranks, open_run(recipe, ranks) as run:
        train(recipe, run)
        report = ranks.on_first(lambda: write_report(run.path))
        return report if ranks.is_first else None


@contextmanager
def launched_ranks(recipe: AnyRecipe) -> Iterator[Ranks]:
    """This process among the ranks that a launcher started, once they agree; their failures in plain words."""
    with plain_failures(recipe), joined_ranks(collective_timeout(recipe)) as ranks:
        require_agreement(recipe, ranks)
        yield ranks


def collective_timeout(recipe: BaseRecipe) -> float:
    """Seconds that a rank waits for the others: where one of them waits for a server, as long as it may."""
    stall = recipe.reliability.stall_timeout
    if isinstance(recipe, GrpoRecipe) and recipe.rollout.engine == "vllm-server":
        return stall + recipe.rollout.patience + recipe.rollout.request_timeout
    return stall


@contextmanager
def plain_failures(recipe: BaseRecipe) -> Iterator[None]:
    """Memory errors, and collectives that another rank left, as TrainingError with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"out of memory: {str(error).splitlines()[0]}\nlower learner.max_tokens_per_microbatch "
            f"({recipe.learner.max_tokens_per_microbatch}), or set learner.gradient_checkpointing: true; neither "
            "changes the result"
        ) from error
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"a collective failed: {str(error).splitlines()[0]}\nmostly because another rank ended, which says why, or "
            "waited longer than reliability.stall_timeout; the same command goes on from the newest checkpoint"
        ) from error

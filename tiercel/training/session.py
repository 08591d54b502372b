"""A run in progress: its rows, how far it has come, where it reports, and when it saves and stops."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tiercel.config.row_sources import names_in
from tiercel.config.schema import BaseRecipe
from tiercel.config.tracker_packages import require_packages
from tiercel.data.row_table import RowTable, RunRows
from tiercel.distributed.ranks import Ranks
from tiercel.errors import EXIT_TAKEN, NonFiniteError, Terminated, TiercelError
from tiercel.log import logger
from tiercel.message_text import counted
from tiercel.reliability.diagnosis import Diagnosis
from tiercel.rollout.pending import PendingGroup
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.directory import RunDirectory, roll_back_to_checkpoint
from tiercel.runs.ending import StopRequest
from tiercel.runs.json_lines import Rows
from tiercel.runs.progress import Progress, waiting
from tiercel.trackers.opening import Trackers, open_trackers
from tiercel.training.checkpoints import OBJECTIVE, Checkpoints
from tiercel.training.finished_step import FinishedStep, StepControl
from tiercel.training.nonfinite_guard import FiniteGuard
from tiercel.training.profiling import profiled, require_steps_to_profile
from tiercel.training.rows import (
    ROWS,
    read_run_rows,
    reject_rows_without_media,
    reject_undecodable_rows,
    require_rows_of,
    require_same_rows,
)
from tiercel.training.run_content import NAMED, content_of, require_content_of
from tiercel.training.run_length import RunLength, is_due, lacks_evaluation, require_schedule, run_length
from tiercel.training.schedule import learning_rate, seed_step
from tiercel.training.start_checks import require_installed
from tiercel.training.step import Step
from tiercel.training.strategy_choice import read_token_budget, write_token_budget
from tiercel.training.trainer import Trainer, build_trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveableStep:
    """A step whose updates are done, with what a checkpoint needs of it: this rank's groups of the next step, and what
    the loss needs of earlier steps."""

    step: Step
    pending: Sequence[PendingGroup]
    state: Mapping[str, float]


@dataclass(slots=True)
class SaveSlot:
    """The newest step that could still be saved; None while weights change, and once it is saved."""

    newest: SaveableStep | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run in progress. All ranks call its methods together."""

    recipe: BaseRecipe
    run: RunDirectory
    rows: RunRows
    length: RunLength
    found: FoundCheckpoint | None
    checkpoints: Checkpoints
    guard: FiniteGuard
    progress: Progress
    stop: StopRequest
    diagnosis: Diagnosis
    trackers: Trackers  # none but on the first rank
    is_unscored: bool  # whether the evaluation after `start` updates is still to be made
    control: StepControl = field(default_factory=StepControl)  # what the caller of the Python API asks for
    unsaved: SaveSlot = field(default_factory=SaveSlot)

    @property
    def ranks(self) -> Ranks:
        return self.run.ranks

    @property
    def table(self) -> RowTable:
        """Return the rows that are trained on."""
        return self.rows.train

    @property
    def start(self) -> int:
        """Return the number of updates done before."""
        return self.found.step if self.found else 0

    @property
    def restored_state(self) -> Mapping[str, float]:
        """Return the `state` that `stage_for_saving` got for the step of the newest checkpoint; empty in a new run."""
        return self.found.state.get(OBJECTIVE, {}) if self.found else {}

    @property
    def is_over(self) -> bool:
        """Return whether all steps are done and evaluated."""
        return self.start >= self.length.steps and not self.is_unscored

    def open_trainer(self) -> Trainer:
        """Build the trainer, either new or as the newest checkpoint left it. What it chose is kept for when the run
        resumes."""
        trainer = build_trainer(self.recipe, self.found, self.ranks, read_token_budget(self.recipe, self.run))
        write_token_budget(self.recipe, self.run, trainer.max_tokens)
        return trainer

    def is_evaluated_after(self, step: Step) -> bool:
        """Return whether the held-out rows are scored at the end of a step."""
        return is_due(step.updates_done, self.recipe.train.eval_every, self.length)

    def record_first_evaluation(self, row: Mapping[str, float]) -> None:
        """Record the evaluation before the first step of this process: of a new run, or one that a stop or an error
        ended, which is added to its step. Raises RecipeError if that of a new run lacks the metric of
        train.keep_best."""
        if not row:
            return
        self.checkpoints.is_best(self.start, row)
        if self.found is None:
            self._record({"step": 0, **row})
        else:
            self.checkpoints.add_score(self.found, row)
            self.run.complete_row(self.start, row)
            self.trackers.row({"step": self.start, **row})

    @contextmanager
    def forgiving_repeated_failure(self) -> Iterator[None]:
        """Go on without an evaluation that is made up for and fails, on all ranks: it has ended the run once."""
        try:
            yield
        except TiercelError as error:
            if self.found is None or not self._is_common(error) or isinstance(error, Terminated):
                raise
            logger.warning(f"the held-out rows could not be scored after step {self.start} this time either: {error}")

    def require_no_stop(self, step: int) -> None:
        """Raise Terminated, on all ranks, if a stop is asked for during the evaluation after `step` updates."""
        if self._is_stop_asked():
            raise self._stopped(
                f"stopped during the evaluation after step {step}; run the same command again to make it and resume"
            )

    def profiled(self, step: Step) -> AbstractContextManager[None]:
        """Return the context in which a step runs, which writes a trace if train.profile asks for one."""
        return profiled(self.recipe.train.profile, self.run, step.updates_done)

    def prepare_update(self, trainer: Trainer, step: Step) -> float:
        """Set and return the learning rate of a step, and seed its dropout. From here on, weights change."""
        self.unsaved.newest = None
        rate = self.control.lr
        if rate is None:
            rate = learning_rate(self.recipe.optim, step.number, self.length.steps)
        trainer.strategy.set_learning_rate(rate)
        seed_step(self.recipe.train.seed, step.number, trainer.ranks.rank)
        return rate

    def stage_for_saving(
        self, step: Step, pending: Sequence[PendingGroup] = (), state: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Keep what a checkpoint needs of a step whose updates are done. `pending`: this rank's groups of the next
        step; `state`: what the loss needs of earlier steps."""
        self.unsaved.newest = SaveableStep(step=step, pending=pending, state=dict(state))

    def record_step(self, step: Step) -> None:
        """Write the step's metrics, send them to the trackers, log warnings and show progress."""
        row = self._whole_row(step)
        step.is_best = self.is_evaluated_after(step) and self.checkpoints.is_best(step.updates_done, row)
        step.metrics = row  # from here on it counts as recorded
        self._record(row)
        for finding in self.diagnosis.add(step.metrics):
            logger.warning(finding.line)
        self.progress.step(step.metrics)

    def finished(self, step: Step) -> FinishedStep:
        """Return a recorded step as the Python API hands it out."""
        return FinishedStep(number=step.updates_done, metrics=step.metrics, run=self.run.path, control=self.control)

    def save_if_due(self, step: Step, trainer: Trainer) -> None:
        """Save a kept step if that is due."""
        if step.is_best or is_due(step.updates_done, self.recipe.train.save_every, self.length):
            self._save(trainer)

    def end_if_asked(self, step: Step, trainer: Trainer) -> None:
        """Raise Terminated, once the step is saved, if SIGTERM or SIGINT came, or the caller of the Python API ends the
        run."""
        if self._is_stop_asked():
            if self.unsaved.newest is not None:
                self._save(trainer)
            raise self._stopped(
                f"stopped after step {step.updates_done}, which was saved; run the same command again to resume"
            )

    @contextmanager
    def saved_on_error(self, trainer: Trainer) -> Iterator[None]:
        """Save the newest step if the block fails between updates, on all ranks, such as by rows that are found to be
        unusable or a reward that raises, or if its evaluation is stopped. Steps that did not end, and numbers that are
        not finite, are not saved. Raises Terminated if the caller breaks out of the iterator over the steps, on a
        single rank."""
        try:
            yield
        except GeneratorExit as left:
            if self.ranks.world_size > 1:
                raise
            if self.unsaved.newest is not None:
                self._save_before(trainer, self.unsaved.newest.step, "the loop over the steps was left")
            raise Terminated(
                "the loop over the steps was left; call the same function again to resume from the newest checkpoint"
            ) from left
        except Terminated:
            if self.unsaved.newest is not None:  # its evaluation was stopped
                self._save_unscored(trainer, self.unsaved.newest.step)
            raise
        except Exception as error:
            is_taken = getattr(error, "exit_code", None) == EXIT_TAKEN  # here, or on another rank
            if self._is_common(error) and self.unsaved.newest and not (is_taken or isinstance(error, NonFiniteError)):
                self._save_before(trainer, self.unsaved.newest.step, "the run ends with an error")
            raise

    def _save_before(self, trainer: Trainer, step: Step, reason: str) -> None:
        is_unscored = "step" not in step.metrics and self.is_evaluated_after(step)  # its evaluation failed
        try:
            self._save_unscored(trainer, step)
        except (TiercelError, OSError, RuntimeError) as error:
            logger.warning(f"step {step.updates_done} could not be saved: {error}")
            return
        logger.warning(f"{reason}; step {step.updates_done} was saved; run the same command again to resume from it")
        if is_unscored:
            logger.warning(
                f"the held-out rows were not scored after step {step.updates_done}: the same command scores them "
                f"before it goes on, and `tiercel eval {self.run.path}` does so alone"
            )

    def _save_unscored(self, trainer: Trainer, step: Step) -> None:
        """Save a step, and record it if it is not recorded because its evaluation did not end."""
        if "step" not in step.metrics:
            step.metrics = self._whole_row(step)
            self._record(step.metrics)
            self.progress.step(step.metrics)
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        kept, self.unsaved.newest = self.unsaved.newest, None
        assert kept is not None
        self.checkpoints.save(trainer, kept.step.updates_done, kept.step.metrics, kept.pending, kept.state)

    def _whole_row(self, step: Step) -> dict[str, float]:
        return {
            "step": step.updates_done,
            **step.metrics,
            "update/left_out": self.guard.skipped_updates,
            "rows/rejected": len(step.batch.rejected),
        }

    def _is_common(self, error: Exception) -> bool:
        """Return whether all ranks raise an error, so that they can go on together."""
        return self.ranks.world_size == 1 or getattr(error, "is_of_all_ranks", False)

    def _is_stop_asked(self) -> bool:
        return self.ranks.all_reduce_any(self.stop.is_set or self.control.is_stopped)

    def _stopped(self, message: str) -> Terminated:
        """Make the error that ends the run on all ranks."""
        error = Terminated(message)
        error.is_by_caller = self.ranks.all_reduce_any(self.control.is_stopped)
        return error

    def _record(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, then pass it to the trackers."""
        self.run.record(row)
        if self.recipe.trackers:  # trackers may show the step's pictures
            self.ranks.run_on_all(self.run.finish_files)
        self.trackers.row(row)


@contextmanager
def open_session(recipe: BaseRecipe, run: RunDirectory) -> Iterator[Session]:
    """Check that everything the recipe needs is installed, read the rows, find the newest valid checkpoint, and cut off
    what is past it."""
    require_installed(recipe)
    set_up_numerics(recipe)
    ranks = run.ranks
    log = run.path / "log.txt" if ranks.is_first else None
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(log, 0, recipe.train.log_every))
        for line in run.changed:
            logger.warning(line)
        with waiting(f"reading the rows of {', '.join(names_in(recipe.data.train))}"):
            read = ranks.run_on_all(lambda: read_run_rows(recipe, run))
        rows = read.train.identity(ranks.heartbeat.beat)
        require_same_rows(ranks, rows)
        length = run_length(recipe, len(read.train.rows))
        require_steps_to_profile(recipe.train.profile, length.steps)
        progress.total_steps = length.steps
        stop = stack.enter_context(StopRequest())
        ranks.run_on_first(lambda: require_packages(recipe.trackers))
        content = ranks.run_on_first(lambda: content_of(recipe, read, ranks.heartbeat.beat))

        def require_own(found: FoundCheckpoint) -> None:
            require_content_of(found, content)
            require_rows_of(found, rows=rows)

        found = ranks.run_on_first(lambda: roll_back_to_checkpoint(run, require_own))
        kept = Rows(run.metrics_file) if ranks.is_first else ()
        if found is None:
            require_schedule(recipe.optim, length.steps)
        is_unscored = ranks.run_on_first(lambda: lacks_evaluation(recipe, run, length, found))
        is_over = found is not None and found.step >= length.steps and not is_unscored
        names = recipe.trackers if ranks.is_first and not is_over else ()
        trackers = stack.enter_context(open_trackers(names, recipe, run.path, kept, length.steps))
        session = Session(
            recipe=recipe,
            run=run,
            rows=read,
            length=length,
            found=found,
            checkpoints=Checkpoints(run=run, recipe=recipe, state={ROWS: rows, NAMED: content}),
            guard=FiniteGuard(run, recipe),
            progress=progress,
            stop=stop,
            diagnosis=Diagnosis(kept),
            trackers=trackers,
            is_unscored=is_unscored,
        )
        if not is_over:
            reject_undecodable_rows(recipe, read.train, run, session.start)
            for table in read.tables:
                reject_rows_without_media(recipe, table, run, session.start)
        origin = f"going on from step {session.start}" if found else "a new run"
        many = f", {ranks.world_size} ranks" if ranks.world_size > 1 else ""
        logger.info(f"{run.path}: {origin}, {counted(length.steps, 'step')}{many}")
        if is_over:
            logger.info("nothing left to do")
        yield session
        logger.info(f"done: {run.path}; look at it: tiercel report {run.path}")


_OWN_THREADS: dict[str, int] = {}


def set_up_numerics(recipe: BaseRecipe) -> None:
    """Set threads and deterministic kernels, before the first tensor. A recipe that sets no threads gets those that
    this process had before another one set them."""
    if recipe.train.threads is not None:
        _OWN_THREADS.setdefault("before", torch.get_num_threads())
        torch.set_num_threads(recipe.train.threads)
    elif _OWN_THREADS:
        torch.set_num_threads(_OWN_THREADS.pop("before"))
    torch.use_deterministic_algorithms(recipe.train.deterministic)

"""What both loops need before their first step, and the pieces of a step that they share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiercel.config.schema import BaseRecipe
from tiercel.data import reading
from tiercel.data.loader import Encoded, StepBatch, StepLoader, StepOrder
from tiercel.data.order import prompts_of_epochs, steps_of_epochs
from tiercel.data.reading import RowTable, RunRows, require_few_bad, write_bad_rows
from tiercel.data.rows import Purpose
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.distributed.strategy import LOADS_IN_TURNS, SHARDING, Strategy, build_strategy
from tiercel.errors import DataError, RecipeError, Terminated
from tiercel.learner.forms import chosen_form
from tiercel.learner.layout import pack
from tiercel.learner.learner import Learner
from tiercel.models.attention import shared_prefix_obstacle
from tiercel.models.loading import read_tensors
from tiercel.models.memory_errors import weight_bytes
from tiercel.models.policy import Policy, build_policy, starting_weights
from tiercel.models.reference import restore_reference, save_reference
from tiercel.models.saving import restore_adapter, save_trained
from tiercel.models.vision import VisionStore
from tiercel.reliability.diagnosis import Diagnosis
from tiercel.rollout.pending import PendingGroup, load_pending, save_pending
from tiercel.runs.checkpoints import SCORE, FoundCheckpoint, best_scored, is_better, prune, save_checkpoint
from tiercel.runs.directory import RunDirectory, read_metrics, resume_point
from tiercel.runs.progress import Progress
from tiercel.runs.stopping import StopRequest
from tiercel.runs.waiting import waiting
from tiercel.trackers.opening import Trackers, open_trackers, require_packages
from tiercel.training.choice import chosen_strategy
from tiercel.data.encoding import require_readable
from tiercel.training.finite import require_finite_weights
from tiercel.training.first_rows import try_first_rows
from tiercel.training.sharing import padding_item
from tiercel.training.update import Engine
from tiercel.writing import GO_ON, writing

Place: TypeAlias = tuple[str, str]  # of a row: its file, and its id there
ROWS = "rows"  # in a checkpoint's state: the identity of the rows that the run takes in turn
LOWEST_IS_BEST = ("eval/loss",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """How long the run is: steps, and the global index before which it stops (None: no end but the steps)."""

    steps: int
    end: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run that is under way: its ranks and rows, how far it is, whom it tells, and whether it was asked to stop."""

    run: RunDirectory
    ranks: Ranks
    read: RunRows
    rows: Mapping[str, Any]  # the training rows' identity
    length: Length
    found: FoundCheckpoint | None
    progress: Progress
    stop: StopRequest
    diagnosis: Diagnosis
    trackers: Trackers  # none but on the first rank

    @property
    def table(self) -> RowTable:
        """The rows that are trained on."""
        return self.read.train

    @property
    def start(self) -> int:
        """Updates done so far."""
        return self.found.step if self.found else 0

    @property
    def steps(self) -> int:
        """Updates done at the end."""
        return self.length.steps

    def record(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl; once it is there, the trackers get it."""
        self.run.record(row)
        self.trackers.row(row)

    def diagnose(self, row: Mapping[str, float]) -> None:
        """Say what is going wrong, each fault once."""
        for finding in self.diagnosis.add(row):
            self.progress.say(finding.line)


@contextmanager
def open_session(recipe: BaseRecipe, purpose: Purpose, run: RunDirectory) -> Iterator[Session]:
    """Read the rows, find the newest valid checkpoint, cut off what is past it."""
    set_up_numerics(recipe)
    ranks = run.ranks
    log = run.path / "log.txt" if ranks.is_first else None
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(log, 0, recipe.train.log_every))
        with waiting(progress.say, f"reading the rows of {recipe.data.train}"):
            read = ranks.together(lambda: read_run_rows(recipe, purpose, run))
        rows = read.train.identity()
        require_same_rows(ranks, rows)
        length = run_length(recipe, len(read.train.rows))
        progress.total_steps = length.steps
        stop = stack.enter_context(StopRequest())
        ranks.on_first(lambda: require_packages(recipe.trackers))
        found = ranks.on_first(lambda: resume_point(run, progress.say, partial(require_rows_of, rows=rows)))
        kept = read_metrics(run.path) if ranks.is_first else []
        is_over = found is not None and found.step >= length.steps
        names = recipe.trackers if ranks.is_first and not is_over else ()
        trackers = stack.enter_context(open_trackers(names, recipe, run.path, kept, length.steps, progress.say))
        session = Session(
            run=run,
            ranks=ranks,
            read=read,
            rows=rows,
            length=length,
            found=found,
            progress=progress,
            stop=stop,
            diagnosis=Diagnosis(kept),
            trackers=trackers,
        )
        if not is_over:
            try_first_rows(recipe, read.train, run, session.start * recipe.optim.prompts_per_step, progress.say)
        origin = f"going on from step {session.start}" if found else "a new run"
        many = f", {ranks.world_size} ranks" if ranks.world_size > 1 else ""
        progress.say(f"{run.path}: {origin}, {length.steps} steps{many}")
        yield session
        progress.say(f"done: {run.path}")


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def set_up_numerics(recipe: BaseRecipe) -> None:
    """Threads and deterministic kernels, before the first tensor."""
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    torch.use_deterministic_algorithms(recipe.train.deterministic)


def read_run_rows(recipe: BaseRecipe, purpose: Purpose, run: RunDirectory) -> RunRows:
    """The run's rows; rejected ones are recorded before they can stop the run."""
    rows = reading.read_run_rows(recipe.data, purpose, run.ranks.pulse.beat)
    for table in rows.tables:
        require_readable(recipe, table)
        if run.ranks.is_first:
            write_bad_rows(table.rejected, run.bad_rows_file)
        require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected)
    return rows


def require_same_rows(ranks: Ranks, rows: Mapping[str, Any]) -> None:
    """A picture's header may decide whether a row is read, and a node may lack the picture: its order of rows would be
    another. `rows`: the table's identity. Raises DataError on all ranks."""
    every = ranks.gather(rows)
    if odd := [rank for rank, each in enumerate(every) if each != every[0]]:
        counts = ", ".join(f"rank {rank}: {sum(every[rank]['counts'])}" for rank in (0, odd[0]))
        raise DataError(f"data.train: ranks can use different rows ({counts}); do all machines see the same images?")


def require_rows_of(found: FoundCheckpoint, *, rows: Mapping[str, Any]) -> None:
    """Raises DataError where the run so far had other rows than these: it would go on in another order."""
    before = found.state.get(ROWS)
    if before is not None and before != rows:
        raise DataError(
            f"data.train: {_counted(rows)} can be used now, {_counted(before)} when {found.path} was written, or they "
            "stand elsewhere, so the run would go on with other rows than it would have had; restore the files and "
            "images (`tiercel check` names rejected rows), or name another output"
        )


def _counted(rows: Mapping[str, Any]) -> str:
    return " + ".join(map(str, rows["counts"])) + " rows"


def run_length(recipe: BaseRecipe, row_count: int) -> Length:
    """Steps as given, or as many as the epochs take."""
    if recipe.train.steps is not None:
        return Length(steps=recipe.train.steps, end=None)
    assert recipe.train.epochs is not None
    size = recipe.optim.prompts_per_step
    return Length(
        steps=steps_of_epochs(recipe.train.epochs, row_count, size),
        end=prompts_of_epochs(recipe.train.epochs, row_count),
    )


def step_order(recipe: BaseRecipe, session: Session) -> StepOrder:
    """The training rows' order for this rank."""
    return StepOrder(
        rows=session.table.order(recipe.train.seed, recipe.data.shuffle),
        prompts_per_step=recipe.optim.prompts_per_step,
        end=session.length.end,
        rank=session.ranks.rank,
        world_size=session.ranks.world_size,
    )


def build_engine(
    recipe: BaseRecipe,
    found: FoundCheckpoint | None,
    temperature: float,
    say: Callable[[str], None] = lambda text: None,
    ranks: Ranks = ALONE,
) -> Engine:
    """Policy, learner and optimiser, as new or as a checkpoint left them. `say` hears why prompts are not shared."""
    device = training_device()
    ranks.pulse.begin("load", found.step if found else 0)
    weights = found.path / "model" if found and recipe.lora is None else None
    name = chosen_strategy(recipe, ranks, device, say)

    def load_and_wrap() -> tuple[Policy, Strategy]:
        policy = build_policy(recipe, device, weights, stays_on_cpu=name in SHARDING)
        start = starting_weights(policy, recipe, weights)
        if found is not None and policy.peft is not None:
            restore_adapter(policy, found.path / "adapter")
            restore_reference(policy, found.path)
        obstacle = shared_prefix_obstacle(policy.family.language_model(policy.model).config)
        form = chosen_form(recipe.learner.form, device, obstacle)
        if obstacle:
            say(
                f"learner.form: repeated, each completion with a prompt of its own: this model cannot share, {obstacle}"
            )
        learner = Learner(policy, form, recipe.learner.gradient_checkpointing)
        return policy, build_strategy(name, recipe, ranks, policy, learner, start)

    with waiting(say, f"loading {recipe.model.path}{_size_of(weights or Path(recipe.model.path).expanduser())}"):
        # A rank that shards holds the whole model while it does; in turns, a machine's memory holds it once.
        policy, strategy = ranks.in_turns(load_and_wrap) if name in LOADS_IN_TURNS else load_and_wrap()
    if found is not None:
        strategy.restore(read_tensors(found.path / "optimizer.safetensors"), found.state["loss_scaler"])
    engine = Engine(
        policy=policy,
        learner=strategy.learner,
        vision=VisionStore(policy, recipe.model.vision_cache_bytes),
        strategy=strategy,
        max_grad_norm=recipe.optim.max_grad_norm,
        temperature=temperature,
    )
    engine.learner.eval()
    if not strategy.passes_are_private:
        # FSDP2 takes the module that is called first for the root; the sampler must not be the one to call.
        with torch.no_grad():
            engine.learner(pack([padding_item(policy.family)]), None, temperature)
    return engine


def _size_of(checkpoint: Path) -> str:
    """The size of a local checkpoint's weights, in words."""
    with suppress(OSError):  # who loads them says it
        return f", {weight_bytes(checkpoint) / 1e9:.1f} GB" if checkpoint.is_dir() else ""
    return ""


def pending_of(found: FoundCheckpoint | None) -> dict[int, PendingGroup]:
    """The groups that a checkpoint kept for the next step."""
    return {} if found is None else load_pending(found.path)


def save(
    run: RunDirectory,
    recipe: BaseRecipe,
    engine: Engine,
    step: int,
    row: Mapping[str, float],
    rows: Mapping[str, Any],
    pending: Sequence[PendingGroup] = (),
) -> None:
    """A checkpoint after `step` updates; older ones than the newest `train.keep` are removed, but for the best.
    `row`: the step's metrics; `rows`: the identity of the run's rows; `pending`: this rank's groups of the next
    step. Raises RunError where the disk is full, say."""

    engine.ranks.pulse.begin("save", step)
    strategy = engine.strategy
    weights = strategy.model_weights() if recipe.lora is None else strategy.trained_weights()
    engine.ranks.on_first(lambda: require_finite_weights(weights, step))
    moments = strategy.optimizer_tensors()
    groups = [group for each in engine.ranks.gather_to_first(list(pending)) for group in each]
    state: dict[str, Any] = {
        "next_index": step * recipe.optim.prompts_per_step,
        "loss_scaler": strategy.scaler_state(),
        ROWS: dict(rows),
    }
    if (metric := recipe.train.keep_best) is not None and metric in row:
        state[SCORE] = {metric: row[metric]}

    def write(directory: Path) -> None:
        save_trained(engine.policy, directory, weights)
        save_reference(engine.policy, directory)
        save_file(moments, directory / "optimizer.safetensors")
        save_pending(directory, groups)

    def save_and_prune() -> None:
        needed = byte_count(weights) + byte_count(moments)
        with writing(f"{run.checkpoints}: the checkpoint of step {step}", f"{GO_ON} from the newest checkpoint"):
            save_checkpoint(run.checkpoints, step, write, state, expected_bytes=needed)
        prune(run.checkpoints, step, recipe.train.keep, best_so_far(run, recipe, step))

    engine.ranks.on_first(save_and_prune)


def best_so_far(run: RunDirectory, recipe: BaseRecipe, step: int) -> FoundCheckpoint | None:
    """The checkpoint that train.keep_best keeps; None without one."""
    metric = recipe.train.keep_best
    return None if metric is None else best_scored(run.checkpoints, step, metric, lowest=metric in LOWEST_IS_BEST)


def is_best(run: RunDirectory, recipe: BaseRecipe, step: int, row: Mapping[str, float]) -> bool:
    """Whether this evaluated step is better than every checkpoint, by train.keep_best. All ranks ask together; the
    first one has the metrics of all. Raises RecipeError where the evaluation has no such metric."""
    metric = recipe.train.keep_best
    if metric is None:
        return False

    def judge() -> bool:
        if metric not in row:
            raise RecipeError([f"train.keep_best: {metric} given, which no reward of the recipe yields (correct_at)"])
        best = best_so_far(run, recipe, step - 1)
        return best is None or is_better(row[metric], best.state[SCORE][metric], lowest=metric in LOWEST_IS_BEST)

    return run.ranks.on_first(judge)


def byte_count(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors as a file holds them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last one, happens after `step` updates."""
    return step == last or (every is not None and step % every == 0)


def steps_of(loader: StepLoader[Encoded], ranks: Ranks) -> Iterator[StepBatch[Encoded]]:
    """The loader's steps: this rank's prompts, and the rejected rows of all ranks."""
    for _ in range(loader.steps_left):
        batch = ranks.together(lambda: next(loader))
        ranks.pulse.beat()
        yield with_all_rejected(batch, ranks)


def with_all_rejected(batch: StepBatch[Encoded], ranks: Ranks) -> StepBatch[Encoded]:
    """This rank's prompts, and the rejected rows of all ranks."""
    return replace(batch, rejected=tuple(row for rows in ranks.gather(batch.rejected) for row in rows))


def check_rejected(batch: StepBatch, table: RowTable, known: set[Place], recipe: BaseRecipe, run: RunDirectory) -> None:
    """Record the step's rejected rows; stop where they are too many. `known` collects where they stand over the run."""
    if not batch.rejected:
        return
    if run.ranks.is_first:
        write_bad_rows(batch.rejected, run.bad_rows_file)
    known.update((row.file, row.id) for row in batch.rejected)
    run.ranks.together(
        lambda: require_few_bad(len(table.rejected) + len(known), table.total, recipe.data, batch.rejected)
    )
    if not run.ranks.any(bool(batch.prompts)):
        first = batch.rejected[0]
        raise DataError(f"every row of step {batch.step} was rejected; the first, {first.id}: {first.reason}")


def end_if(is_asked: bool, step: int) -> None:
    """Raises Terminated, for exit code 75, after SIGTERM or SIGINT; the step was saved before."""
    if is_asked:
        raise Terminated(f"stopped after step {step}, saved; the same command goes on from there")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout is a function of (seed, step, rank), so that a resumed run repeats it."""
    torch.manual_seed((seed * 1_000_003 + step + rank * 7_919_000_003) % 2**63)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU since the last call, else of the process so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def per_token(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Token sums as means."""
    return {name: value / max(1, tokens) for name, value in sums.items()}

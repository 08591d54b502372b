"""`tiercel check`: find everything that can fail, before it costs GPU time. It loads weights only of an adapter, of a
reward model, and of a model whose family needs a proof for each checkpoint. Of all other weights it reads the headers
of their files."""

import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from tiercel.algorithms.custom_trial import try_own_functions
from tiercel.cli.dry_run import Readers, dry_run, first_prompts, require_answers, truth_readers
from tiercel.config import GrpoRecipe, Recipe
from tiercel.config.keys import named
from tiercel.data.coverage import run_coverage
from tiercel.data.encoding import decode_videos, require_readable, require_usable, row_plans
from tiercel.data.media.images import open_header
from tiercel.data.odd_rows import odd_boxes, odd_lines, settled
from tiercel.data.reading import read_run_rows
from tiercel.data.rejected_rows import require_few_bad, write_fix_report
from tiercel.data.row_table import RowTable
from tiercel.data.scan import PlannedPrompt, Scan, ScanReport, decoded_size
from tiercel.data.stores import view_of
from tiercel.devices import training_device
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.log import printed
from tiercel.message_text import counted
from tiercel.messages import translated
from tiercel.messages.console import SpeakingConsole
from tiercel.models.chat import turn_end_line
from tiercel.models.families.base import Family
from tiercel.models.families.loading import family_of
from tiercel.models.policy import load_for_inference
from tiercel.models.prompts import conversation_length, prompt_length
from tiercel.packing.forward_equivalence_check import check_forward_equivalence
from tiercel.planning.run_files import RowCounts, run_files
from tiercel.planning.sizes import count as count_weights
from tiercel.reliability.redaction import redact
from tiercel.rewards.runtime.scorer import require_coordinates
from tiercel.rollout.vllm.requests import require_served
from tiercel.rollout.vllm.routes import told_rate
from tiercel.rollout.vllm.server import connect
from tiercel.training.distillation.served_teacher import open_served
from tiercel.training.grpo.completion_sampling import open_dialogues
from tiercel.training.run_length import run_length
from tiercel.training.start_checks import missing_packages, rehearse
from tiercel.types import Row, Size

REPORT_FILE = Path("rejected_rows.jsonl")
SPOKEN_SECONDS = 30.0  # between lines of progress, if the output is a file
SPREAD = {0: "least", 50: "median", 90: "90 %", 99: "99 %", 100: "most"}


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Print what was found. Raises TiercelError at the first problem that would end the run. Missing packages are
    printed first, and raised after everything else has been checked."""
    console = SpeakingConsole(highlight=False, soft_wrap=True)
    console.print(f"recipe: {arguments.recipe} is a valid {named(recipe.kind).partition(' ')[2]} recipe")
    missing = missing_packages(recipe)
    for error in missing:
        console.print(f"  not installed: {error}", markup=False)
    _check(recipe, arguments, console)
    if missing:
        raise missing[0]
    console.print("check passed")


def _check(recipe: Recipe, arguments: Namespace, console: Console) -> None:
    family = family_of(recipe)
    if isinstance(recipe, GrpoRecipe):
        require_coordinates(recipe.rewards, family.coordinate_space)
    console.print(
        f"model: {family.architecture} at {family.checkpoint.path}, {family.vocabulary_size:,} tokens in its vocabulary"
    )
    if (line := turn_end_line(family)) is not None:
        console.print(f"  {line}", markup=False)
    if "strftime_now" in family.checkpoint.chat_template and not recipe.data.template_arguments:
        console.print(
            "  the chat template may write today's date, and prompts then change from day to day; a variable for it in "
            "data.template_arguments, such as date_string, or a template of your own in data.template fixes the date"
        )
    if family.needs_proof:
        policy = load_for_inference(recipe, training_device(), None)
        console.print(f"  {check_forward_equivalence(policy).line}", markup=False)
    for line in rehearse(recipe, family):
        console.print(f"  {line}", markup=False)
    with printed(console.print), ExitStack() as stack:
        dialogues = stack.enter_context(open_dialogues(recipe, family))
        rows = read_run_rows(recipe.data, recipe.purpose)
        train = rows.train
        for table in rows.tables:
            require_readable(recipe, table)
        with truth_readers(recipe) as readers:
            check = RowCheck(recipe=recipe, family=family, readers=readers, decodes=arguments.decode)
            reports = [_scanned(check, table, console, is_train=table is train) for table in rows.tables]
        if arguments.fix_report:
            file = arguments.report_file or REPORT_FILE
            count = write_fix_report([row for report in reports for row in report.rejected], file, recipe.data)
            console.print(f"{file}: rejected rows with their reasons: {count:,}")
        for report in reports:
            require_few_bad(len(report.rejected), report.accepted + len(report.rejected), recipe.data)
        if isinstance(recipe, GrpoRecipe):
            for line in run_coverage(recipe.rewards, rows):
                console.print(line, markup=False)
            if not recipe.rollout.engine_kind.shares_weights:
                require_served(family, recipe.rollout.engine)
            rejected = {(row.file, row.line) for report in reports for row in report.rejected}
            looked = map(view_of(train.rows).look, range(len(train.rows)))
            usable = (row for row in looked if isinstance(row, Row) and (row.file, row.line) not in rejected)
            dry_run(recipe, family, dialogues, train.rows, first_prompts(recipe, family, usable), console)
            group_size, rewards = recipe.rollout.group_size, len(recipe.rewards)
            for line in try_own_functions(recipe.algorithm, group_size=group_size, rewards=rewards):
                console.print(line, markup=False)
            if recipe.rollout.engine_kind.is_served:
                _ask_servers(recipe, family, console)
            if recipe.taught_by is not None and recipe.taught_by.url is not None:
                open_served(recipe, recipe.taught_by).require_answer()
                console.print(f"the teacher at {recipe.taught_by.url}: answers", markup=False)
    console.print(token_table(recipe, reports[0], len(train.rows)))
    console.print(files_line(recipe, family, reports), markup=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCheck:
    """What every row is asked while its file is scanned."""

    recipe: Recipe
    family: Family
    readers: Readers
    decodes: bool  # pictures and videos, whole

    def plan(self, row: Row, sizes: list[Size], *, is_train: bool) -> PlannedPrompt:
        """Count a row's tokens, and note what is odd about its boxes. Raises DataError for a row that the run could not
        use, whose completions could not be sampled by servers, or not be compared with its right answer."""
        recipe, family = self.recipe, self.family
        samples = isinstance(recipe, GrpoRecipe)
        if is_train or not samples:  # held-out prompts are only completed
            require_usable(recipe, row)
        if self.decodes:
            decode_videos(recipe.data, row)
        plans = row_plans(family, recipe.data, row, sizes)
        if isinstance(recipe, GrpoRecipe):
            require_answers(recipe, family, row, plans, self.readers)
            if recipe.rollout.engine_kind.is_served:
                told_rate(family, row.id, plans)
        is_other_side = recipe.purpose == "pairs" and row.rejected is None
        notes = () if is_other_side else tuple(odd_boxes(row, plans, family, is_learnt=not samples))
        length = prompt_length if samples else conversation_length
        return PlannedPrompt(tokens=length(family, row, plans, recipe.data.system), notes=notes)


def _scanned(check: RowCheck, table: RowTable, console: Console, *, is_train: bool) -> ScanReport:
    recipe, file = check.recipe, table.file
    doing, spoken = "decoded" if check.decodes else "scanned", time.monotonic()
    with console.status(translated(f"{file}: {len(table.rows):,} rows")) as status:

        def progress(done: int, total: int) -> None:
            nonlocal spoken
            text = translated(f"{file}: {doing} {done:,} of {total:,} rows")
            status.update(text)
            if not console.is_terminal and time.monotonic() - spoken > SPOKEN_SECONDS:  # a file shows no status
                spoken = time.monotonic()
                console.print(text, markup=False)

        measure = decoded_size if check.decodes else open_header
        plan = partial(check.plan, is_train=is_train)
        scan = Scan(plan_prompt=plan, config=recipe.data, measure=measure, is_shared=not check.readers)
        report = scan(table, progress)
    rejected = report.rejected
    tokens = ", ".join(f"{SPREAD[percent]} {count:,}" for percent, count in report.prompt_token_percentiles.items())
    images = ", ".join(f"{rows:,} with {count}" for count, rows in sorted(report.rows_by_image_count.items()))
    console.print(f"{file}: {counted(table.total, 'row')} in {table.format} format, {len(rejected):,} rejected")
    if recipe.data.ids == "line":
        console.print("  ids of rows: file and line, as data.ids says")
    left_out = (
        f"column {name} of {counted(count, 'row')} is left out, because it has values of type {kind}, which JSON does "
        "not have"
        for (name, kind), count in report.left_out.items()
    )
    for note in (*left_out, *table.notes, *odd_lines(recipe.data, table, is_learnt=recipe.purpose != "grpo")):
        console.print(f"  {note}", markup=False)
    for reason, count in settled(report.notes, check.family).items():
        console.print(f"  note on {counted(count, 'row')}: {reason}", markup=False)
    if report.accepted:
        console.print(f"  tokens of a prompt: {tokens}; rows by number of images: {images}")
    if check.decodes:
        console.print(f"  every picture decoded, all whole: images {report.image_count:,}, rows {report.accepted:,}")
    for row in rejected[:10]:
        console.print(redact(f"  rejected {row.file}:{row.line} ({row.id}) {row.field}: {row.reason}"), markup=False)
    return report


def _ask_servers(recipe: GrpoRecipe, family: Family, console: Console) -> None:
    """Ask every server. Raises EnvironmentProblem if one does not answer or serves another model."""
    sampler = connect(recipe, family)
    faults = sampler.faults()
    sampler.close()
    for state in sampler.states.every:
        url = state.server.url
        console.print(redact(f"server {url}: {faults.get(url, 'answers')}"), markup=False)
    if faults:
        raise EnvironmentProblem(f"rollout.urls: {', '.join(faults)} failed; `tiercel serve RECIPE` starts one")


def token_table(recipe: Recipe, report: ScanReport, row_count: int) -> Table:
    """Return a table of the tokens of a step, with the prompt once per group and once per completion. Raises DataError
    if a conversation does not fit a microbatch."""
    table = Table(title=translated("one step"), title_justify="left", show_header=False)
    end = run_length(recipe, row_count).end
    prompts = recipe.optim.prompts_per_step if end is None else min(recipe.optim.prompts_per_step, end)
    middle = report.prompt_token_percentiles.get(50, 0)
    share = prompts / row_count
    if share <= 1:
        _row(table, "rows", f"{prompts} of {row_count:,}, {share:.2%} of an epoch")
    else:
        _row(table, "rows", f"{prompts} of only {row_count:,}, so {share:.3g} epochs")
    budget = recipe.learner.max_tokens_per_microbatch
    if isinstance(recipe, GrpoRecipe):
        group, new = recipe.rollout.group_size, recipe.rollout.longest
        shared, repeated = middle + group * new, group * (middle + new)
        _row(table, "completions", f"{prompts} x {group} = {prompts * group}, up to {new} tokens each")
        _row(table, "learner tokens, prompt once per group", f"up to {prompts * shared:,} at the median prompt")
        _row(table, "the same with repeated prompts", f"{prompts * repeated:,}, {repeated / shared:.1f} times as many")
        _row(table, "microbatches", _microbatches(prompts * shared, budget))
    else:
        _row(table, "tokens", f"about {prompts * middle:,} at the median conversation")
        _row(table, "microbatches", _microbatches(prompts * middle, budget))
        longest = report.prompt_token_percentiles.get(100, 0)
        if budget != "auto" and longest > budget:
            raise DataError(
                f"the longest conversation has {longest} tokens, more than learner.max_tokens_per_microbatch = {budget}"
            )
    return table


def files_line(recipe: Recipe, family: Family, reports: Sequence[ScanReport]) -> str:
    """Say how much a run will write, and how much room there is. `reports` are of its training rows and then of its
    held-out rows, if it has any."""
    train, *others = reports
    counts = RowCounts(
        rows=train.accepted,
        images=train.image_count,
        heldout=sum(report.accepted for report in others),
        heldout_images=sum(report.image_count for report in others),
    )
    steps = run_length(recipe, max(1, train.accepted)).steps
    files = run_files(recipe, count_weights(recipe, family.checkpoint.config, family), steps, counts)
    output = Path(recipe.output).absolute()
    place = next(place for place in (output, *output.parents) if place.is_dir())
    free = shutil.disk_usage(place).free
    return (
        f"the run writes up to {_size(files.total)}: {_size(files.rollouts)} of rollouts, {_size(files.pictures)} of "
        f"pictures, {counted(files.checkpoints, 'checkpoint')} of {_size(files.checkpoint)}; {_size(free)} are free"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(translated, cells))


def _microbatches(tokens: int, budget: int | Literal["auto"]) -> str:
    """Return the number and the size of a step's microbatches as text."""
    if budget == "auto":
        return "of as many tokens as fit the memory (learner.max_tokens_per_microbatch: auto)"
    return f"about {max(1, round(tokens / budget))} of {budget:,} tokens"

"""The parts of the page that show one run, as report.html and the page of `tiercel view` both have them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from markupsafe import Markup

from tiercel.reliability.diagnosis import Symptom
from tiercel.web.report.curves import charts_of, time_chart, times_of
from tiercel.web.report.heldout import held_out_of
from tiercel.web.report.numbers import TIMES
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, RecordedRun, read_groups
from tiercel.web.report.rollouts import legend_of, shown_step
from tiercel.web.report.templates import drawn
from tiercel.web.report.verdict import Notice, changes, completions_sampled, headline, progress, warning

TABS = {
    "curves": "Curves",
    "rollouts": "Rollouts",
    "heldout": "Held out",
    "ranks": "Ranks and time",
    "details": "Data and recipe",
    "compare": "Compare",
}
_LINES_AT_START = 12  # of the log, before the first step
_LOG_LINES = 25


def curves_part(run: RecordedRun, said: Sequence[Notice], findings: Markup | str = "") -> Markup:
    """Show the verdict, the problems of the run, and its curves. `findings`: what `findings_part` made, if it is known
    by now."""
    return drawn(
        "curves.html",
        run=run,
        headline=headline(run).replace("->", "→"),
        changes=changes(run),
        seconds=sum(value for key in ("time/step", "eval/time") for _, value in run.series(key)),
        progress=progress(run),
        sampled=completions_sampled(run),
        said=said,
        findings=findings,
        begun="" if run.metrics else "\n".join(run.log[-_LINES_AT_START:]),
        shown=chain(charts_of(run), filter(None, [time_chart(run)])),  # one by one: each has all its points
    )


def findings_part(found: Sequence[Symptom]) -> Markup:
    """Make a table of the faults, each with the step that showed it first."""
    return drawn("findings.html", found=found)


def rollouts_part(files: Sequence[GroupFile], step_count: int, album: Album) -> Markup:
    """Show some groups of the steps that were chosen out of `step_count`."""
    groups = [group for file in files for group in file.groups]
    return drawn(
        "rollouts.html",
        steps=[shown_step(file, album) for file in files],
        step_count=step_count,
        marks=legend_of(groups),
        has_teacher=any(completion.teacher for group in groups for completion in group.completions),
        album=album,
    )


def compared_evaluations(run: RecordedRun) -> list[GroupFile]:
    """Read the held-out rows at the first and the last evaluation."""
    steps = run.evaluation_steps
    return [read_groups(run, "evaluations", step) for step in dict.fromkeys((*steps[:1], *steps[-1:]))]


def held_out_part(files: Sequence[GroupFile], album: Album) -> Markup:
    """Show held-out rows at the first and the last evaluation, and what cannot be read."""
    shown = [file for file in files if file.groups]
    said = [warning(file.problem) for file in files if file.problem]
    return drawn("heldout.html", found=held_out_of(shown[0], shown[-1]) if shown else None, said=said, album=album)


def times_part(run: RecordedRun) -> Markup:
    """Show where the time of the steps went."""
    return drawn("times.html", times=times_of(run), chart=time_chart(run))


def details_part(run: RecordedRun, most: int) -> Markup:
    """Show rejected rows, `most` of them, the recipe, the environment and the end of the log."""
    log = [line if len(line) <= 500 else f"{line[:500]} …" for line in run.log[-_LOG_LINES:]]
    return drawn("details.html", run=run, most=most, log=log, facts=facts(run), versions=list(versions(run)))


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the most important keys of the recipe; an empty text if it has none."""

    def of(*keys: str) -> str:
        value = run.setting(*keys)
        return "" if value is None else str(value)

    trained, lora, rewards = "every weight that is not frozen", run.setting("lora"), run.setting("rewards")
    if isinstance(lora, Mapping):
        trained = f"LoRA of rank {lora.get('rank')}, alpha {lora.get('alpha')}, on {lora.get('targets')}"
    given = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    named = [f"{each.get('name') or each.get('call')} {TIMES} {each.get('weight', 1)}" for each in given]
    prompts, group, most = of("optim", "prompts_per_step"), of("rollout", "group_size"), of("rollout", "max_new_tokens")
    unit = ("prompt" if run.kind in ("grpo", "distill") else "conversation") + "s" * (prompts != "1")
    return [
        ("Model", f"{of('model', 'path')} {of('model', 'dtype')}".strip()),
        ("Trained", trained if run.recipe else ""),
        ("Rows", of("data", "train") + (f"; held out {of('data', 'eval')}" if of("data", "eval") else "")),
        ("Rewards", ", ".join(named)),
        ("Step", f"{prompts} {unit}" + (f" {TIMES} {group} completions" if group else "") if prompts else ""),
        ("Sampling", f"up to {most} tokens at temperature {of('rollout', 'temperature')}" if most else ""),
        ("Learning rate", f"{of('optim', 'lr')} {of('optim', 'schedule')}".strip()),
        ("Seed", of("train", "seed")),
    ]


def versions(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield versions and devices."""
    packages, gpus = run.environment.get("packages"), run.environment.get("gpus")
    for key, value in run.environment.items():
        if key not in ("packages", "gpus"):
            yield key.replace("_", " "), str(value)
    if isinstance(gpus, list):
        yield "GPUs", ", ".join(map(str, gpus)) or "none"
    if isinstance(packages, Mapping):
        yield from ((name, str(version)) for name, version in sorted(packages.items()))

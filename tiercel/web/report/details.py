"""Recipe, environment, rejected rows, the end of the log, and how to repeat the run."""

from collections.abc import Iterator, Mapping, Sequence

from tiercel.reliability.diagnosis import Symptom
from tiercel.web.report.cards import clipped, text_block
from tiercel.web.report.markup import Html, aside, element, section, side_head, table
from tiercel.web.report.numbers import TIMES
from tiercel.web.report.reading import Run
from tiercel.wording import counted

_BAD_ROWS_SHOWN = 20
_LOG_LINES_SHOWN = 25
_LONGEST_FILE = 40_000  # characters


def recipe_section(run: Run) -> Html:
    """Show the most important keys, then the whole file."""
    facts = [(side_head(label), text) for label, text in _facts(run) if text]
    whole = element("details", element("summary", "config.yaml"), text_block(run.config_text, longest=_LONGEST_FILE))
    return section("recipe", "Recipe", table(facts) if facts else None, whole)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    def of(*keys: str) -> str:
        value = run.setting(*keys)
        return "" if value is None else str(value)

    yield "Model", " ".join(part for part in (of("model", "path"), of("model", "dtype")) if part)
    lora = run.setting("lora")
    if isinstance(lora, Mapping):
        yield "Trained", f"LoRA of rank {lora.get('rank')}, alpha {lora.get('alpha')}, on {lora.get('targets')}"
    elif run.recipe:
        yield "Trained", "every weight that is not frozen"
    yield "Rows", of("data", "train") + (f"; held out {of('data', 'eval')}" if of("data", "eval") else "")
    rewards = run.setting("rewards")
    if isinstance(rewards, list):
        given = [each for each in rewards if isinstance(each, Mapping)]
        named = [f"{each.get('name') or each.get('call')} {TIMES} {each.get('weight', 1)}" for each in given]
        yield "Rewards", ", ".join(named)
    prompts, group = of("optim", "prompts_per_step"), of("rollout", "group_size")
    unit = "prompts" if run.kind in ("grpo", "distill") else "conversations"
    yield "Step", f"{prompts} {unit}" + (f" {TIMES} {group} completions" if group else "") if prompts else ""
    if most := of("rollout", "max_new_tokens"):
        yield "Sampling", f"up to {most} tokens at temperature {of('rollout', 'temperature')}"
    yield "Learning rate", " ".join(part for part in (of("optim", "lr"), of("optim", "schedule")) if part)
    yield "Seed", of("train", "seed")


def reproduce_section(run: Run) -> Html:
    """Show the command that repeats the run."""
    text = (
        "Use this run's config.yaml, in the directory that its relative paths start from. On a CPU with the same "
        "versions and threads the numbers are the same. Without another output, the command resumes this run from its "
        "newest valid checkpoint."
    )
    command = element("pre", f"tiercel {run.kind} config.yaml output=runs/again", class_="said")
    return section("again", "Make this run again", command, element("p", text))


def environment_section(run: Run) -> Html | None:
    """Show versions and devices."""
    if not run.environment:
        return None
    packages, gpus = run.environment.get("packages"), run.environment.get("gpus")
    known = {key: value for key, value in run.environment.items() if key not in ("packages", "gpus")}
    pairs = [(key.replace("_", " "), str(value)) for key, value in known.items()]
    if isinstance(gpus, list):
        pairs.append(("GPUs", ", ".join(map(str, gpus)) or "none"))
    if isinstance(packages, Mapping):
        pairs += [(name, str(version)) for name, version in sorted(packages.items())]
    return section("environment", "Environment", table((side_head(key), value) for key, value in pairs))


def bad_rows_section(run: Run, most: int = _BAD_ROWS_SHOWN) -> Html | None:
    """Show the first rejected rows, each with its reason."""
    if not run.bad_rows:
        return None
    columns = ("id", "file", "line", "field", "reason")
    shown = run.bad_rows[:most]
    rows = [[clipped(str(row.get(column, "")), 300) for column in columns] for row in shown]
    more = len(run.bad_rows) - len(shown)
    rest = aside(f"and {counted(more, 'row')} more in bad_rows.jsonl" if more else None)
    return section("rejected", "Rejected rows", table(rows, columns), rest)


def log_section(run: Run) -> Html | None:
    """Show the last lines of log.txt."""
    if not run.log:
        return None
    lines = run.log[-_LOG_LINES_SHOWN:]
    summary = element("summary", f"Last {counted(len(lines), 'line')} of log.txt")
    text = text_block("\n".join(clipped(line, 500) for line in lines), longest=_LONGEST_FILE)
    return element("section", element("details", summary, text), id="log")


def symptoms_section(found: Sequence[Symptom]) -> Html | None:
    """Make a table of the faults, each with the step that showed it first; None where there was none."""
    rows = [(f"{each.step:,}", each.text, each.cause, each.recipe_key) for each in found]
    heads = ("step", "what", "likely cause", "look at")
    return section("findings", "Warnings on the way", table(rows, heads)) if rows else None

"""Recipe, environment, rejected rows, the end of the log, and how to repeat the run."""

from collections.abc import Iterator, Mapping

from tiercel.plurals import counted
from tiercel.report.cards import clipped, text_block
from tiercel.report.markup import Html, element
from tiercel.report.numbers import TIMES
from tiercel.report.reading import Run

_BAD_ROWS_SHOWN = 20
_LOG_LINES_SHOWN = 25
_LONGEST_FILE = 40_000  # characters


def recipe_section(run: Run) -> Html:
    """Show the most important keys, then the whole file."""
    facts = [(label, text) for label, text in _facts(run) if text]
    rows = [element("tr", element("th", label, scope="row"), element("td", text)) for label, text in facts]
    whole = element("details", element("summary", "config.yaml"), text_block(run.config_text, longest=_LONGEST_FILE))
    return element(
        "section",
        element("h2", "Recipe"),
        element("div", element("table", element("tbody", rows), class_="plain"), class_="scroll") if rows else None,
        whole,
        id="recipe",
    )


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
        named = [each for each in rewards if isinstance(each, Mapping)]
        yield (
            "Rewards",
            ", ".join(f"{each.get('name') or each.get('call')} {TIMES} {each.get('weight', 1)}" for each in named),
        )
    prompts, group = of("optim", "prompts_per_step"), of("rollout", "group_size")
    unit = "prompts" if run.kind in ("grpo", "distill") else "conversations"
    yield "Step", f"{prompts} {unit}" + (f" {TIMES} {group} completions" if group else "") if prompts else ""
    if of("rollout", "max_new_tokens"):
        yield (
            "Sampling",
            f"up to {of('rollout', 'max_new_tokens')} tokens at temperature {of('rollout', 'temperature')}",
        )
    yield "Learning rate", " ".join(part for part in (of("optim", "lr"), of("optim", "schedule")) if part)
    yield "Seed", of("train", "seed")


def reproduce_section(run: Run) -> Html:
    """Show the command that repeats the run."""
    command = f"tiercel {run.kind} config.yaml output=runs/again"
    text = (
        "Use this run's config.yaml, in the directory that its relative paths start from. On a CPU with the same "
        "versions and threads the numbers are the same. Without another output, the command resumes this run from its "
        "newest valid checkpoint."
    )
    return element(
        "section",
        element("h2", "Make this run again"),
        element("pre", command, class_="said"),
        element("p", text),
        id="again",
    )


def environment_section(run: Run) -> Html | None:
    """Show versions and devices."""
    if not run.environment:
        return None
    packages = run.environment.get("packages")
    versions = dict(packages) if isinstance(packages, Mapping) else {}
    gpus = run.environment.get("gpus")
    known = {key: value for key, value in run.environment.items() if key not in ("packages", "gpus")}
    pairs = [(key.replace("_", " "), value) for key, value in known.items()]
    if isinstance(gpus, list):
        pairs.append(("GPUs", ", ".join(map(str, gpus)) or "none"))
    pairs += sorted(versions.items())
    rows = [element("tr", element("th", key, scope="row"), element("td", str(value))) for key, value in pairs]
    table = element("div", element("table", element("tbody", rows), class_="plain"), class_="scroll")
    return element("section", element("h2", "Environment"), table, id="environment")


def bad_rows_section(run: Run) -> Html | None:
    """Show the first rejected rows, each with its reason."""
    if not run.bad_rows:
        return None
    shown = run.bad_rows[:_BAD_ROWS_SHOWN]
    columns = ("id", "file", "line", "field", "reason")
    header = element("tr", [element("th", column, scope="col") for column in columns])
    rows = [
        element("tr", [element("td", clipped(str(row.get(column, "")), 300)) for column in columns]) for row in shown
    ]
    more = len(run.bad_rows) - len(shown)
    table = element("table", element("thead", header), element("tbody", rows), class_="plain")
    return element(
        "section",
        element("h2", "Rejected rows"),
        element("div", table, class_="scroll"),
        element("p", f"and {counted(more, 'row')} more in bad_rows.jsonl", class_="aside") if more else None,
        id="rejected",
    )


def log_section(run: Run) -> Html | None:
    """Show the last lines of log.txt."""
    if not run.log:
        return None
    lines = run.log[-_LOG_LINES_SHOWN:]
    summary = f"Last {counted(len(lines), 'line')} of log.txt"
    text = "\n".join(clipped(line, 500) for line in lines)
    return element(
        "section", element("details", element("summary", summary), text_block(text, longest=_LONGEST_FILE)), id="log"
    )

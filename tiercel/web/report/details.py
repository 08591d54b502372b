"""Recipe and environment of a run, as lines of a table."""

from collections.abc import Iterator, Mapping

from tiercel.web.report.numbers import TIMES
from tiercel.web.report.reading import RecordedRun


def facts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield the most important keys of the recipe; an empty text if it has none."""

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

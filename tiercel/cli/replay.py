"""`tiercel replay`: which row and which layer made an update that was not finite."""

from collections.abc import Sequence
from pathlib import Path

from tiercel.config import load_recipe
from tiercel.config.schema import Deepspeed
from tiercel.errors import NonFiniteError
from tiercel.runs.directory import kind_of, load_run_recipe, require_no_redaction
from tiercel.training.replay import kept_directory, replay


def replay_run(run: Path, overrides: Sequence[str], step: int | None) -> None:
    """Raises NonFiniteError where it is not finite again."""
    kind = kind_of(load_run_recipe(run))
    recipe = load_recipe(kind, run / "config.yaml", overrides, check_paths=False)
    alone = recipe.train.model_copy(update={"strategy": "single", "deepspeed": Deepspeed()})
    recipe = recipe.model_copy(update={"train": alone})
    require_no_redaction(recipe, run)
    directory = kept_directory(run, step)
    print(f"{directory}, each row alone:")
    findings = replay(recipe, run, directory, print)
    if faulty := [finding.row for finding in findings if not finding.is_finite]:
        raise NonFiniteError("the loss or the gradient is again not finite", [list(dict.fromkeys(faulty))])
    print(
        f"all {len(findings)} are finite here: the cause is not in these rows and weights alone, but in what differs: "
        "the device, the number of ranks, or other values of the recipe"
    )

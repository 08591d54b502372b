"""`tiercel import-command`: a recipe from a command line of ms-swift, TRL or VLM-R1, or from a script that has one."""

import sys
from pathlib import Path

from tiercel.config.loading import problems_of_text
from tiercel.errors import RecipeError
from tiercel.importing.conversion import draft_of
from tiercel.importing.launches import launch_of
from tiercel.importing.shell import commands
from tiercel.importing.text import recipe_text


def import_command(given: str, output: Path | None) -> None:
    """Print the recipe, or write it where `output` says. Raises RecipeError where there is no command to be found, or a
    number of it is none."""
    script = Path(given).read_text(encoding="utf-8") if Path(given).is_file() else given
    try:
        launches = [launch for launch in map(launch_of, commands(script)) if launch is not None]
        if not launches:
            raise RecipeError(
                ["no command of `swift rlhf --rlhf_type grpo`, `swift sft`, `trl grpo`, or of a training script under "
                 "torchrun or accelerate was found; write it in quotes, or name the file of a shell script"]
            )  # fmt: skip
        launch = launches[0]
        draft = draft_of(launch)
    except ValueError as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError([f"the command cannot be read: {error}"]) from error
    draft.values.setdefault("output", "runs/imported")
    text = recipe_text(launch, draft)
    if len(launches) > 1:
        text = f"# The first of {len(launches)} training commands.\n{text}"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
        print(output)
    for problem in problems_of_text(text, launch.kind):
        print(f"still to do: {problem}", file=sys.stderr)

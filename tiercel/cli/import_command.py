"""`tiercel import-command`: make a recipe from a command of another framework, or from a file with one."""

import sys
from argparse import Namespace
from pathlib import Path

from tiercel.config.loading import problems_of_text
from tiercel.errors import RecipeError
from tiercel.importing.conversion import draft_of, refusals
from tiercel.importing.launches import Foreign, Launch, launch_of
from tiercel.importing.shell import commands
from tiercel.importing.text import recipe_text
from tiercel.messages import translated
from tiercel.writing import write_text


def run(recipe: None, arguments: Namespace) -> None:
    """Make a recipe as the command line says."""
    import_command(arguments.given, arguments.output)


def import_command(given: str, output: Path | None) -> None:
    """Print the recipe, or write it to `output`, and say what is left to do.

    Raises:
        RecipeError: there is no training command, it asks for a method that tiercel does not have, or a value that
            must be a number is not one.
    """
    text, problems = imported(given)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
        print(output)
    for problem in problems:
        print(translated(f"still to do: {problem}"), file=sys.stderr)


def imported(given: str) -> tuple[str, list[str]]:
    """Return the recipe's text, and a line for each of its problems. Raises as `import_command` does."""
    file = Path(given) if len(given) < 4096 and "\n" not in given and Path(given).is_file() else None
    script = given if file is None else file.read_text(encoding="utf-8")
    try:
        found = [launch for command in commands(script, file) if (launch := launch_of(command, file)) is not None]
        launch = first_launch(found)
        if lines := refusals(launch):
            raise RecipeError(lines)
        draft = draft_of(launch)
    except ValueError as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError([f"the command cannot be read: {error}"]) from error
    draft.values.setdefault("output", "runs/imported")
    text = recipe_text(draft)
    if len(found) > 1:
        text = f"# The first of {len(found)} training commands.\n{text}"
    return text, problems_of_text(text, launch.kind)


def first_launch(found: list[Launch | Foreign]) -> Launch:
    """Return the first command that can be converted. Raises RecipeError where there is none, with what each command
    asks for."""
    launches = [launch for launch in found if isinstance(launch, Launch)]
    if launches:
        return launches[0]
    if found:
        raise RecipeError([each.told() for each in found if isinstance(each, Foreign)])
    raise RecipeError(
        ["no command of `swift rlhf`, `swift sft`, `trl`, `llamafactory-cli train`, or of a training script under "
         "torchrun or accelerate was found; write it in quotes, or name the file of a script"]
    )  # fmt: skip

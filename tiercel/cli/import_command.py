"""`tiercel import-command`: make a recipe from a command of another framework, or from a file that contains one."""

import sys
from argparse import Namespace
from os.path import isdir, isfile
from pathlib import Path

from tiercel.config.loading import problems_of_text
from tiercel.config.yaml_text import YamlProblem
from tiercel.convert.conversion import draft_of, refusals
from tiercel.convert.detect_program import Foreign
from tiercel.convert.launches import Launch, launch_of
from tiercel.convert.shell import commands
from tiercel.convert.text import recipe_text
from tiercel.errors import RecipeError
from tiercel.message_text import LONGEST_PATH
from tiercel.messages import translated
from tiercel.writing import write_text

LARGEST_SCRIPT = 1_000_000  # bytes


def run(recipe: None, arguments: Namespace) -> None:
    """Make a recipe as the command line says."""
    import_command(arguments.given, arguments.output)


def import_command(given: str, output: Path | None) -> None:
    """Print the recipe, or write it to `output`, and print what is left to do.

    Raises:
        RecipeError: the file does not exist or has no training command, the command asks for a method that tiercel does
            not have, a value that must be a number is not one, or words were left over.
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
    """Return the recipe's text and a line for each of its problems. Raises the same errors as `import_command`."""
    file = Path(given) if len(given) < LONGEST_PATH and "\n" not in given else None
    if file is not None and not isfile(file):  # Path.is_file raises an error if a name is too long
        if len(given.split()) == 1:  # every command has more words
            if isdir(file):
                raise RecipeError(["this is a directory; name the file of a script"], given)
            raise RecipeError([f"there is no such file (relative paths start at {Path.cwd()})"], given)
        file = None
    try:
        return _imported(given if file is None else _text_of(file), file)
    except RecipeError as error:
        raise RecipeError([*error.problems], "" if file is None else given) from error


def _text_of(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > LARGEST_SCRIPT:
            raise RecipeError(
                [f"has {size} bytes, but a script that starts training may have at most {LARGEST_SCRIPT}"]
            )
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError([f"line {line} is not UTF-8 text; save the file as UTF-8"]) from error
    except OSError as error:
        raise RecipeError([f"cannot be read: {error}"]) from error


def _imported(script: str, file: Path | None) -> tuple[str, list[str]]:
    try:
        found = [launch for command in commands(script, file) if (launch := launch_of(command, file)) is not None]
        launch = first_launch(found)
        if lines := refusals(launch):
            raise RecipeError(lines)
        draft = draft_of(launch)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError([f"the command cannot be read: {error}"]) from error
    draft.values.setdefault("output", "runs/imported")
    text = recipe_text(draft)
    if len(found) > 1:
        text = f"# The first of {len(found)} training commands.\n{text}"
    try:
        return text, draft.left + problems_of_text(text, launch.kind)
    except YamlProblem as problem:
        raise RecipeError([f"its recipe cannot be read: {problem}"]) from problem


def first_launch(found: list[Launch | Foreign]) -> Launch:
    """Return the first command that can be converted. If there is none, raises RecipeError with what each command asks
    for."""
    launches = [launch for launch in found if isinstance(launch, Launch)]
    if launches:
        return launches[0]
    if found:
        raise RecipeError([each.told for each in found if isinstance(each, Foreign)])
    raise RecipeError(
        ["no command of `swift rlhf`, `swift sft`, `trl`, `llamafactory-cli train`, `python -m verl.trainer.main`, or "
         "of a training script under torchrun or accelerate was found; write it in quotes, or name the file of a shell "
         "script, or of a Python script that makes a config of TRL such as GRPOConfig(...)"]
    )  # fmt: skip

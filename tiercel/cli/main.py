"""The command line's entry point. No heavy library is imported before the recipe has been checked."""

import argparse
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tiercel.cli import recipes
from tiercel.cli.arguments import PAGE, build_parser, rank_options
from tiercel.cli.preload import read_weights_ahead
from tiercel.config import Recipe
from tiercel.config.keys import RECIPES
from tiercel.config.suggestions import nearest_key
from tiercel.distributed.launch import launch, leave
from tiercel.distributed.rank_status_files import note_code, note_error, start_notes
from tiercel.errors import (
    ANY_RECIPE,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    ElsewhereError,
    RecipeError,
    TiercelError,
)
from tiercel.log import printed
from tiercel.messages import translated
from tiercel.processes import launched_rank
from tiercel.reliability.privacy import keep_private
from tiercel.reliability.redaction import redact, redact_tracebacks
from tiercel.runs.progress import waiting
from tiercel.secret_names import harmless_words
from tiercel.training.process_guard import process_guard
from tiercel.web.view.page_process import page_beside

STDOUT = 1  # its descriptor
SECONDS_TO_SPEAK = 2.0  # lets the rank at fault report first: once this rank has ended, the launcher ends the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command. Its recipe is read and checked first. Then its module, which may load torch, is imported, and the
    module's `run(recipe, arguments)` does the rest."""

    module: str
    read: Callable[[argparse.Namespace], Recipe] | None = None  # None: the command takes no recipe
    loads_weights: bool = False
    is_watched: bool = False  # several ranks may run it under a watchdog; `run` also gets the heartbeat


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 the user's input, 3 the training, 4 a stall, 5 a run directory
    that another process is using, 75 stopped after saving. Without a command it prints the help and returns 0."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(build_parser(), given)
    if arguments.command is None or getattr(arguments, "look", "") is None:
        arguments.without_command.print_help()
        return EXIT_DONE
    if (code := start_notes()) is not None:
        return code
    try:
        run_command(arguments, given)
    except ElsewhereError as error:  # the rank that failed reports it
        note_code(error.exit_code)
        if launched_rank() is not None:
            time.sleep(SECONDS_TO_SPEAK)
        return error.exit_code
    except TiercelError as error:
        rank = "" if launched_rank() is None else f" (rank {launched_rank()})"
        text = f"tiercel {arguments.command}{rank}: {translated(redact(str(_with_file(error, arguments))))}"
        print(text, file=sys.stderr)
        note_error(text)
        note_code(error.exit_code)
        return error.exit_code
    return EXIT_DONE


def run_command(arguments: argparse.Namespace, given: Sequence[str]) -> None:
    """Check the command's recipe, then import and run the command, in this process or as new ranks. `given` holds the
    words of the command line."""
    command = COMMANDS[arguments.command]
    recipe = command.read(arguments) if command.read else None
    if arguments.command == "view" or (recipe is not None and recipe.runs_user_code):
        keep_private()  # before anything is forked
    if command.is_watched and recipe is not None:
        _run_watched(command, recipe, arguments, given)
    else:
        _imported(command, recipe, arguments).run(recipe, arguments)


def _run_watched(command: Command, recipe: Recipe, arguments: argparse.Namespace, given: Sequence[str]) -> None:
    with _page_of(recipe, arguments):
        if _wants_ranks(arguments):
            words = [word for word in rank_options().parse_known_args(given)[1] if not is_page(word)]
            launch(words, arguments.nproc, arguments.max_restarts, recipe.reliability.stall_timeout)
            return
        with process_guard(recipe, arguments.command) as heartbeat:
            _imported(command, recipe, arguments).run(recipe, arguments, heartbeat)


def is_page(word: str) -> bool:
    """Return whether a word of the command line is --view or an abbreviation of it, which argparse also accepts."""
    return len(word) > 2 and PAGE.startswith(word)


def _page_of(recipe: Recipe, arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Return the context that serves the run's page if it is wanted, on one rank only."""
    is_wanted = getattr(arguments, "view", False) and not launched_rank()
    return page_beside(Path(recipe.output)) if is_wanted else nullcontext()


def _imported(command: Command, recipe: Recipe | None, arguments: argparse.Namespace) -> Any:
    """Import the command's module."""
    if command.loads_weights and recipe is not None:
        read_weights_ahead(recipe)
    is_first = not launched_rank()
    with (
        fast_imports(),
        printed(_print_on_stderr, is_first=is_first),
        waiting(f"importing what `tiercel {arguments.command}` needs"),
    ):
        return import_module("tiercel.doctor.packages").imported(command.module)


@contextmanager
def fast_imports() -> Iterator[None]:
    """Disable the garbage collector during imports: its repeated passes over all modules take a fifth of the time. Its
    later passes skip what was imported."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _print_on_stderr(text: str) -> None:
    print(translated(text), file=sys.stderr, flush=True)


def _wants_ranks(arguments: argparse.Namespace) -> bool:
    if getattr(arguments, "nproc", 1) == 1 and getattr(arguments, "max_restarts", 0) == 0:
        return False
    if "LOCAL_RANK" in os.environ or (launched_rank() is not None and int(os.environ["WORLD_SIZE"]) > 1):
        raise RecipeError(
            [
                "--nproc: cannot be used, because a launcher has already started this process as one of its ranks; "
                "remove it"
            ]
        )
    return True


def _with_file(error: TiercelError, arguments: argparse.Namespace) -> TiercelError:
    """Add the recipe's file to a problem that was found after the recipe had been read from it."""
    file = getattr(arguments, "recipe", None) or getattr(arguments, "target", None)
    if isinstance(error, RecipeError) and error.source == ANY_RECIPE and file is not None:
        return RecipeError(list(error.problems), str(file))
    return error


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command. Overrides may also follow options, a place where argparse does not look for
    them."""
    arguments, left = parser.parse_known_args(argv)
    if left and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in left)):
        shown = harmless_words(left)
        hint = _hint(shown) if hasattr(arguments, "overrides") else ""
        told = f"unrecognized arguments: {' '.join(shown)}"
        parser.error(redact("; ".join(filter(None, (told, translated(hint))))))
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def _hint(words: Sequence[str]) -> str:
    """Return a suggestion for the first unknown flag, such as `write optim.lr=1e-5` for --learning_rate 1e-5, or an
    empty string if no key is similar."""
    place = next(place for place, word in enumerate(words) if word.startswith("-"))
    name, equals, value = words[place].partition("=")
    following = "".join(words[place + 1 : place + 2])
    value = value if equals or following.startswith("--") or not following else following
    near = nearest_key(name.lstrip("-"))
    if near.key and near.hint:
        return f"use {near.key} ({near.hint})"
    return f"use {near.key}={value or 'VALUE'}" if near.key else near.hint


def entry_point() -> None:
    """Run the `tiercel` script."""
    redact_tracebacks()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # some locales cannot write every character
    try:
        code = _written_main()
    except BrokenPipeError:
        if not _is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python writes the rest at its end
        code = EXIT_UNREAD
    except KeyboardInterrupt:  # outside of a step, which is finished and saved first
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt what Python does at its end
        print(translated("tiercel: interrupted"), file=sys.stderr)
        code = EXIT_INTERRUPTED
    leave(code)


def _written_main() -> int:
    """Run a command, and write what it has printed. Raises BrokenPipeError if that is not read to its end."""
    try:
        code = main()
    except SystemExit:  # of argparse, after --help
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return code


def _is_unread() -> bool:
    """Return whether standard output is a pipe whose reader has ended, such as `head`."""
    waiting = select.poll()
    waiting.register(STDOUT, 0)
    return bool(waiting.poll(0))


COMMANDS: dict[str, Command] = {
    "demo": Command(module="tiercel.demo.command"),
    "init": Command(module="tiercel.cli.init"),
    **{
        kind: Command(module="tiercel.cli.train", read=recipes.trained_recipe, loads_weights=True, is_watched=True)
        for kind in RECIPES
    },
    "check": Command(module="tiercel.cli.check", read=recipes.checked_recipe),
    "data": Command(module="tiercel.cli.data", read=recipes.file_recipe),
    "plan": Command(module="tiercel.cli.plan", read=recipes.planned_recipe),
    "doctor": Command(module="tiercel.cli.doctor"),
    "serve": Command(module="tiercel.cli.serve", read=recipes.served_recipe),
    "eval": Command(module="tiercel.cli.evaluate", read=recipes.evaluated_recipe, loads_weights=True, is_watched=True),
    "predict": Command(module="tiercel.cli.predict", read=recipes.predicting_recipe, loads_weights=True),
    "export": Command(module="tiercel.cli.export", read=recipes.exported_recipe, loads_weights=True),
    "replay": Command(module="tiercel.cli.replay", read=recipes.replayed_recipe, loads_weights=True),
    "import-command": Command(module="tiercel.cli.import_command"),
    "runs": Command(module="tiercel.cli.runs"),
    "view": Command(module="tiercel.cli.view"),
    "report": Command(module="tiercel.cli.report"),
    "rollouts": Command(module="tiercel.cli.rollouts"),
}

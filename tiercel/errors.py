"""Errors that you can act on. Each names the field, row or file and the remedy, and has an exit code."""

from tiercel.message_text import counted

EXIT_DONE = 0
EXIT_USER = 2
EXIT_TRAINING = 3
EXIT_STALL = 4
EXIT_TAKEN = 5
EXIT_TERMINATED = 75
EXIT_INTERRUPTED = 130  # as of a shell
EXIT_UNREAD = 141  # as of a shell: what read the output has ended


class TiercelError(ValueError):
    """The base of every error for the user. The command line prints it without a traceback."""

    exit_code = EXIT_USER
    is_of_all_ranks = False  # of several: whether all of them raise at the same place, so that they can still save

    def _render_traceback_(self) -> list[str]:
        """Return only the message for a notebook, which calls this method."""
        return [f"{type(self).__name__}: {self}"]


ANY_RECIPE = "recipe"


class RecipeError(TiercelError):
    """Raised if the recipe is wrong. `problems` has one line for each problem. `source` is its file, if known."""

    def __init__(self, problems: list[str], source: str = ANY_RECIPE):
        self.problems = tuple(problems)
        self.source = source
        lines = (f"  {line}" for line in problems)
        heading = counted(len(problems), "problem")
        super().__init__("\n".join([f"{source}: {heading}" if source else heading, *lines]))


class DataError(TiercelError):
    """Raised if rows or images of the user's data cannot be used. `field` names the wrong field of the row."""

    def __init__(self, message: str, *, field: str = "row"):
        self.field = field
        super().__init__(message)


class ModelError(TiercelError):
    """Raised if the checkpoint cannot be loaded or does not fit the recipe."""


class EnvironmentProblem(TiercelError):
    """Raised if a package, device or file of the machine is missing or has a wrong version."""


class RunError(TiercelError):
    """Raised if the run directory cannot be written, read or resumed."""


class TrainingError(TiercelError):
    """Raised if the training itself fails: numbers that are not finite, too many failed rewards, a lost engine."""

    exit_code = EXIT_TRAINING


class NonFiniteError(TrainingError):
    """Raised on all ranks if a loss, a gradient or an advantage is not finite on one of them. No parameter was changed.
    `rows` has, for each rank, the ids of its rows that are not finite. `places` has the numbers of this rank's
    microbatches of the update that are not finite; None means all."""

    def __init__(
        self, what: str, rows: list[list[str]], advice: str | None = None, places: tuple[int, ...] | None = None
    ):
        self.what = what
        self.rows = rows
        self.places = places
        named = [
            ", ".join(names) + (f" (rank {rank})" if len(rows) > 1 else "") for rank, names in enumerate(rows) if names
        ]
        text = f"{what} for rows {', '.join(named) or 'unknown'}; no parameter was changed"
        super().__init__(text if advice is None else f"{text}\n{advice}")


class StallError(TiercelError):
    """Raised if the run makes no progress because ranks wait for each other and would never continue."""

    exit_code = EXIT_STALL


class TakenError(RunError):
    """Raised if another process has taken over the run directory that this one was writing."""

    exit_code = EXIT_TAKEN


class Terminated(TiercelError):
    """Raised after SIGTERM or SIGINT, once the run has been saved."""

    exit_code = EXIT_TERMINATED
    is_by_caller = False  # whether the caller of the Python API ended the run, by `step.stop()`


class ElsewhereError(TiercelError):
    """Raised if another rank failed and prints the reason. This rank ends with the same exit code."""

    def __init__(self, rank: int, exit_code: int, reason: str = ""):
        self.exit_code = exit_code
        super().__init__(f"rank {rank} failed: {reason}" if reason else f"rank {rank} failed")

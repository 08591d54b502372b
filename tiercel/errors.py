"""Errors that a user can act on. Each names the field, row or file and the remedy, and has an exit code."""

from tiercel.wording import counted

EXIT_DONE = 0
EXIT_USER = 2
EXIT_TRAINING = 3
EXIT_STALL = 4
EXIT_TAKEN = 5
EXIT_TERMINATED = 75


class TiercelError(ValueError):
    """Is the base of every error for the user. The command line prints it without a traceback."""

    exit_code = EXIT_USER

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in a notebook, which asks for this."""
        return [f"{type(self).__name__}: {self}"]


ANY_RECIPE = "recipe"


class RecipeError(TiercelError):
    """Raised where the recipe is wrong. `problems` has one line for each problem. `source`: its file, where known."""

    def __init__(self, problems: list[str], source: str = ANY_RECIPE):
        self.problems = tuple(problems)
        self.source = source
        lines = (f"  {line}" for line in problems)
        heading = counted(len(problems), "problem")
        super().__init__("\n".join([f"{source}: {heading}" if source else heading, *lines]))


class DataError(TiercelError):
    """Raised where rows or images of the user's data cannot be used. `field` names the wrong field of the row."""

    def __init__(self, message: str, *, field: str = "row"):
        self.field = field
        super().__init__(message)


class ModelError(TiercelError):
    """Raised where the checkpoint cannot be loaded or does not fit the recipe."""


class EnvironmentProblem(TiercelError):
    """Raised where a package, device or file of the machine is missing or has a wrong version."""


class RunError(TiercelError):
    """Raised where the run directory cannot be written, read or resumed."""


class TrainingError(TiercelError):
    """Raised where the training itself fails: numbers that are not finite, too many failed rewards, a lost engine."""

    exit_code = EXIT_TRAINING


class NonFiniteError(TrainingError):
    """Raised on all ranks where a loss, a gradient or an advantage is not finite on one of them. No parameter was
    changed. `rows`: for each rank, the ids of its rows that are not finite. `places`: those microbatches of the update
    on this rank, by number; None: all."""

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
    """Raised where the run stands still: ranks wait for each other and would never go on."""

    exit_code = EXIT_STALL


class TakenError(RunError):
    """Raised where another process has taken the run directory that this one was writing."""

    exit_code = EXIT_TAKEN


class Terminated(TiercelError):
    """Raised after SIGTERM or SIGINT, once the run was saved."""

    exit_code = EXIT_TERMINATED


class ElsewhereError(TiercelError):
    """Raised where another rank failed and prints the reason. This rank ends with the same exit code."""

    def __init__(self, rank: int, exit_code: int, reason: str = ""):
        self.exit_code = exit_code
        super().__init__(f"rank {rank} failed: {reason}" if reason else f"rank {rank} failed")

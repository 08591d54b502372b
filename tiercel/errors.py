"""Errors a user can act on. Each names the field, row or file and the remedy; each carries its exit code."""

from tiercel.plurals import counted

EXIT_DONE = 0
EXIT_USER = 2
EXIT_TRAINING = 3
EXIT_STALL = 4
EXIT_TERMINATED = 75


class TiercelError(ValueError):
    """Base of every error meant for the user; the command line prints it without a traceback."""

    exit_code = EXIT_USER


class RecipeError(TiercelError):
    """The recipe is wrong. `problems` holds one line per problem, all of them at once."""

    def __init__(self, problems: list[str], source: str = "recipe"):
        self.problems = tuple(problems)
        self.source = source
        lines = (f"  {line}" for line in problems)
        super().__init__("\n".join([f"{source}: {counted(len(problems), 'problem')}", *lines]))


class DataError(TiercelError):
    """Rows or images of the user's data cannot be used. `field` is the row's field at fault."""

    def __init__(self, message: str, *, field: str = "row"):
        self.field = field
        super().__init__(message)


class ModelError(TiercelError):
    """The checkpoint cannot be loaded or does not fit the recipe."""


class EnvironmentProblem(TiercelError):
    """A package, device or file of the machine is missing or of a wrong version."""


class RunError(TiercelError):
    """The run directory cannot be written, read or resumed."""


class TrainingError(TiercelError):
    """The training itself failed: non-finite numbers, too many failed rewards, an engine lost."""

    exit_code = EXIT_TRAINING


class NonFiniteError(TrainingError):
    """A loss, a gradient or an advantage is not a finite number, on some rank; all raise this, and no parameter was
    changed. `rows`: ids of those at fault, by rank."""

    def __init__(self, what: str, rows: list[list[str]], advice: str | None = None):
        self.what = what
        self.rows = rows
        named = [
            ", ".join(names) + (f" (rank {rank})" if len(rows) > 1 else "") for rank, names in enumerate(rows) if names
        ]
        text = f"{what} for rows {', '.join(named) or 'unknown'}; no parameter was changed"
        super().__init__(text if advice is None else f"{text}\n{advice}")


class StallError(TiercelError):
    """The ranks wait for each other, and would for ever."""

    exit_code = EXIT_STALL


class Terminated(TiercelError):
    """SIGTERM or SIGINT arrived; the run was saved first."""

    exit_code = EXIT_TERMINATED


class ElsewhereError(TiercelError):
    """Another rank failed, and says so itself; this one ends with the same exit code."""

    def __init__(self, rank: int, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"rank {rank} failed")

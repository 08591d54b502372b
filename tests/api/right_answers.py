"""A reward in a file without imports, because the process that runs it imports the file first."""


def right(completion, answer, kind="none"):
    """A reward by the names of its parameters; `kind` is a column that no row has."""
    return float(answer in completion) + (len(completion) % 3) / 10 + (kind != "none")

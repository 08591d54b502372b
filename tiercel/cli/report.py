"""`tiercel report`: a run's report.html, written anew."""

from argparse import Namespace

from tiercel.report import write_report


def run(recipe: None, arguments: Namespace) -> None:
    """Write it and say where it is. Takes a run as it is, whatever became of its recipe."""
    print(write_report(arguments.run))

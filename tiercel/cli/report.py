"""`tiercel report`: write a run's report.html again."""

from argparse import Namespace

from tiercel.web.report import write_report


def run(recipe: None, arguments: Namespace) -> None:
    """Write the report and print its path. The run's recipe is not checked."""
    print(write_report(arguments.run))

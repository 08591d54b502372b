"""`tiercel view`: serve a page of runs on this machine until Ctrl-C."""

from argparse import Namespace

from tiercel.web.view.beside import require_packages


def run(recipe: None, arguments: Namespace) -> None:
    """Serve the page, and print its address. Raises EnvironmentProblem without the extra `view`, or where the port is
    taken; RunError where a path is no run."""
    require_packages()
    from tiercel.web.view.serving import serve

    serve(arguments.runs, arguments.port, beside=arguments.beside)

"""`tiercel view`: serve a page of runs on this machine until Ctrl-C."""

from argparse import Namespace

from tiercel.web.view.page_process import require_packages


def run(recipe: None, arguments: Namespace) -> None:
    """Serve the page, and print its address. Raises EnvironmentProblem if the extra `view` is not installed or the port
    is taken, and RunError if a path is not a run."""
    require_packages()
    from tiercel.web.view.serving import serve

    serve(arguments.runs, arguments.port, beside=arguments.beside)

"""`tiercel replay`: find the row and the layer that caused an update that was not finite."""

from argparse import Namespace

from tiercel.config import Recipe
from tiercel.errors import NonFiniteError
from tiercel.log import printed
from tiercel.training.replay import find_nonfinite_directory, replay, rows_at_fault


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Compute the rows of an update again, one by one. Raises NonFiniteError if one is not finite again."""
    directory = find_nonfinite_directory(arguments.run, arguments.step)
    print(f"{directory}, as it was computed, and each row alone:")
    with printed():
        findings = replay(recipe, arguments.run, directory)
    if faulty := rows_at_fault(findings):
        raise NonFiniteError("the loss or the gradient is again not finite", [faulty])
    print(
        f"all {len(findings)} are finite here, so these rows and weights alone are not the cause; look at what differs "
        "from the run: the device, the number of ranks, or other values of the recipe"
    )

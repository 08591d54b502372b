"""A run as an object."""

import pytest

import tiercel as tc
from tiercel.errors import RunError


@pytest.mark.parametrize("asked", ["metrics", "steps", "rollouts", "recipe", "best"])
def test_a_directory_that_is_not_a_run_is_an_error(tmp_path, asked):
    with pytest.raises(RunError):
        found = getattr(tc.Run(tmp_path), asked)
        found()

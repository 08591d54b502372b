"""The places of waits.py are functions of the product; a renamed one would otherwise be seen only in long runs."""

import importlib
import pkgutil
from functools import reduce

import pytest

import tiercel
from tests.accelerator.waits import ALLOWED

MODULES = {module.name for module in pkgutil.walk_packages(tiercel.__path__, "tiercel.")}


@pytest.mark.parametrize("place", sorted({key.split(":")[0] for key in ALLOWED}))
def test_a_place_is_a_function_of_the_product(place: str):
    parts = ["tiercel", *place.split(".")]
    module = next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in MODULES)
    function = reduce(getattr, parts[module.count(".") + 1 :], importlib.import_module(module))
    assert callable(function)

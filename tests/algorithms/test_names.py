"""The names that a recipe may contain are those of the tables."""

from typing import get_args

import pytest
from pydantic import ValidationError

from tiercel.algorithms import ADVANTAGES, KL_ESTIMATORS, LOSSES
from tiercel.algorithms.advantages import SCALES
from tiercel.algorithms.correction import BOUNDS, LEVELS, Correction
from tiercel.algorithms.losses import NORMALISERS
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.surrogates import SURROGATES, SurrogateKeys


@pytest.mark.parametrize(
    ("key", "table"),
    (
        ("loss", LOSSES),
        ("ratio", RATIOS),
        ("surrogate", SURROGATES),
        ("normalise", NORMALISERS),
        ("advantage", ADVANTAGES),
        ("scale", SCALES),
    ),
)
def test_a_recipe_takes_every_name_of_the_table_and_no_other(key, table):
    for name in table:
        assert getattr(Algorithm.model_validate({key: name}), key) == name
    with pytest.raises(ValidationError):
        Algorithm.model_validate({key: "nothing"})


def test_estimators_and_corrections_are_those_of_the_tables():
    for name in KL_ESTIMATORS:
        assert Algorithm.model_validate({"kl": {"estimator": name}}).kl.estimator == name
    assert set(get_args(Correction.model_fields["level"].annotation)) == {"none", *LEVELS}
    assert set(get_args(Correction.model_fields["mode"].annotation)) == set(BOUNDS)


def test_every_loss_is_made_of_parts_that_are_there():
    for loss in LOSSES.values():
        assert loss.ratio in RATIOS and loss.surrogate in SURROGATES and loss.normalise in NORMALISERS


def test_every_key_of_the_surrogates_is_read_by_one():
    read = {name for each in SURROGATES.values() for name in each.reads}
    assert read == set(SurrogateKeys.model_fields)

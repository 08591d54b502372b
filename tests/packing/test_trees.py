"""Random trees of rows with pictures, in all families and forms, against transformers' own pass over each row."""

import pytest

from benchmarks.exact import PLAIN, Computation, make_case, outcome
from benchmarks.float64 import all_in_float64, in_float64
from benchmarks.random_trees import short_pieces_shared, tree_rows
from tests.tiny_models import FAMILY_NAMES, tiny_policy
from tiercel.packing.layout import pack

DENSE = Computation(label="dense, a tree", form="dense", is_tree=True)
SPLIT = Computation(label="split, a tree", form="split", is_tree=True)
DENSE_CUT = Computation(label="dense, a tree cut", form="dense", is_tree=True, is_cut=True)
SPLIT_CUT = Computation(label="split, a tree cut", form="split", is_tree=True, is_cut=True)
REPEATED = Computation(label="repeated, from a tree", form="repeated", is_tree=True)


def errors(found, right):
    gradient = float((found.gradient - right.gradient).norm() / right.gradient.norm())
    return float((found.logprobs_N - right.logprobs_N).abs().max()), gradient


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_tree_equals_rows_by_themselves(tiny_checkpoints, name):
    """In float64, and in float32 within the rounding of a plain pass, which depends on the processor."""
    single = tiny_policy(tiny_checkpoints[name], noise=0.1)
    double = in_float64(single, tiny_checkpoints[name])
    seed = FAMILY_NAMES.index(name)
    case = make_case(single, seed)
    with short_pieces_shared():
        joined = pack(tree_rows(single.family, seed), single.family)
    assert joined.tree.length < 0.8 * pack(case.items).tree.length and len(joined.tree.levels) >= 3
    with all_in_float64():
        right = outcome(double, case, Computation(label=PLAIN, form=None))
        for computation in (DENSE, DENSE_CUT, SPLIT, SPLIT_CUT, REPEATED):
            logprob, gradient = errors(outcome(double, case, computation), right)
            assert logprob < 1e-12 and gradient < 1e-12, computation.label
    plain = errors(outcome(single, case, Computation(label=PLAIN, form=None)), right)[1]
    for computation in (SPLIT, SPLIT_CUT, DENSE, REPEATED):
        logprob, gradient = errors(outcome(single, case, computation), right)
        assert logprob < 1e-4 and gradient < max(1e-5, 1.5 * plain), computation.label

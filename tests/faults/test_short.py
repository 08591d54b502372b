"""Every fault in its short form: each case ends as it must."""

import pytest

from benchmarks.faults.catalogue import FAULTS


@pytest.mark.catalogue
@pytest.mark.parametrize("name", FAULTS)
def test_every_case_of_a_fault_passes(name, tmp_path):
    figure = FAULTS[name]("short", 0, tmp_path)
    assert figure.fault == name
    assert figure.attempted > 0
    assert figure.failures == ()
    assert figure.passed == figure.attempted

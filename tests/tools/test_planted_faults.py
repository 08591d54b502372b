import pytest

from tools.ci_plan import STEPS
from tools.planted_faults import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.part)
def test_each_fault_can_still_be_planted(fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
    assert all((ROOT / path).exists() for path in fault.beside.split())
    assert fault.step in STEPS

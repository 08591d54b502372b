"""Children that die of real signals, answer wrongly or hang. The parent says which step it was and continues."""

import pytest

from tiercel.doctor.trials import TOLERANCES, Outcome, judge, try_steps
from tiercel.doctor.worker import GPUS


def test_a_dtype_that_kills_or_answers_wrongly_is_named_and_the_rest_is_tried():
    faults = {"float32": "SIGFPE", "bfloat16": "wrong"}
    outcomes = list(try_steps("cpu", (*TOLERANCES, GPUS), faults))
    assert [outcome.step for outcome in outcomes] == ["float32", "bfloat16", "float16", GPUS]
    killed, wrong, right = (judge(outcome, "cpu") for outcome in outcomes[:3])
    assert (killed.name, killed.status) == ("cpu float32", "broken")
    assert killed.found == "its process was killed by SIGFPE"
    assert "nvidia-cublas" in killed.remedy and "model.dtype: float32" in killed.remedy
    assert wrong.status == "broken" and wrong.found.startswith("wrong result: off by matrix product 5.0e-01")
    assert right.status == "ok" and set(outcomes[2].result) == {"matrix product", "attention"}
    assert outcomes[3].failure is None and set(outcomes[3].result) >= {"built_for", "gpus", "architectures"}


@pytest.mark.parametrize(("signal", "remedy"), [("SIGILL", "ATEN_CPU_CAPABILITY"), ("SIGSEGV", "reinstall")])
def test_a_signal_at_the_import_of_torch_ends_the_device(signal, remedy):
    (outcome,) = try_steps("cpu", tuple(TOLERANCES), {"import": signal})
    verdict = judge(outcome, "torch")
    assert (verdict.name, verdict.status) == ("torch import", "broken")
    assert signal in verdict.found and remedy in verdict.remedy


def test_a_hanging_step_is_ended_in_time():
    (outcome,) = try_steps("cpu", tuple(TOLERANCES), {"import": "hang"}, import_seconds=1.0)
    verdict = judge(outcome, "torch")
    assert (verdict.status, verdict.found) == ("broken", "no result within 1 s")


def test_a_result_that_is_not_a_number_is_wrong():
    assert judge(Outcome(step="float32", result={"matrix product": float("nan")}), "cuda").status == "broken"


def test_an_error_of_torch_is_shown_by_its_last_line(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (outcome,) = try_steps("cpu", tuple(TOLERANCES))
    assert judge(outcome, "torch").found == "ImportError: libcudart.so.12: cannot open shared object file"

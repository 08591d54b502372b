"""`tiercel doctor` on this machine, and on one that is broken."""

import json
import subprocess
import sys

import pytest

from tiercel.cli.main import main
from tiercel.doctor.verdict import Verdict

WELL = Verdict(name="torch", status="ok", found="2.13.0")
ABSENT = Verdict(name="import vllm", status="absent", found="not installed")
SHORT = Verdict(name="disk", status="warning", found="1.0 GB free in [runs]", remedy="free some")
BROKEN = Verdict(name="cuda bfloat16", status="broken", found="its process was killed by SIGFPE", remedy="upgrade")


def found_to_be(monkeypatch, *verdicts: Verdict) -> None:
    monkeypatch.setattr("tiercel.cli.doctor.examine", lambda directory: iter(verdicts))


def test_this_machine_is_examined_in_full_and_as_json():
    command = [sys.executable, "-m", "tiercel", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout)
    statuses = {verdict["name"]: verdict["status"] for verdict in report["verdicts"]}
    for name in ("torch", "cpu float32", "cpu bfloat16", "cpu float16", "gloo collectives", "import pyarrow"):
        assert statuses[name] == "ok", done.stdout
    assert {"python", "disk", "processors", "host name", "import vllm"} <= set(statuses)
    assert report["broken"] == list(statuses.values()).count("broken")
    assert done.returncode == (2 if report["broken"] else 0)


def test_a_line_for_each_verdict_and_one_for_all(monkeypatch, capsys):
    found_to_be(monkeypatch, WELL, ABSENT, SHORT)
    assert main(["doctor"]) == 0
    well, absent, short, remedy, summary = capsys.readouterr().out.splitlines()
    assert well.split() == ["ok", "torch", "2.13.0"]
    assert absent.startswith("absent   import vllm")
    assert "1.0 GB free in [runs]" in short
    assert remedy.strip() == "-> free some"
    assert summary == "1 ok, 1 warning, 0 broken"


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_what_is_broken_is_exit_code_2(monkeypatch, capsys, arguments):
    found_to_be(monkeypatch, WELL, BROKEN)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tiercel doctor: broken: cuda bfloat16")
    assert "upgrade" in captured.out
    if "--json" in arguments:
        assert json.loads(captured.out)["broken"] == 1

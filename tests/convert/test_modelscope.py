"""What is left to do for models and rows of ModelScope."""

import pytest

from tests.convert.helpers import DPO, GRPO, drafted

PACKAGE = "hub: modelscope needs its package: pip install modelscope"
GKD = f"{DPO.replace('dpo', 'gkd')} --teacher_model org/t"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "modelscope").mkdir()
    (tmp_path / "modelscope" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr("sys.path", [])


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (GRPO, [f"model.{PACKAGE}"]),
        (GKD, [f"model.{PACKAGE}", f"teacher.{PACKAGE}"]),
        (f"{GRPO} --use_hf true", []),
        (f"USE_HF=1 {GRPO}", []),
        (GRPO.replace("org/m", "./m"), []),
    ],
)
def test_the_package_is_needed_for_a_model_that_is_downloaded(line, expected):
    assert drafted(line).left == expected


@pytest.mark.usefixtures("absent")
def test_a_directory_needs_no_package(tmp_path, monkeypatch):
    (tmp_path / "org" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert drafted(GRPO).left == []


STEPS = "run modelscope download --dataset org/rows --local_dir rows, then use hf:./rows"
ROWS = "swift sft --model ./m --dataset org/rows:human#20"


@pytest.mark.usefixtures("absent")
def test_rows_are_downloaded_after_the_package():
    subject = "--dataset org/rows:human#20: if Hugging Face does not have these rows"
    assert drafted(ROWS).left == [f"{subject}, run pip install modelscope; {STEPS}"]
    assert drafted(ROWS.replace("org/rows", "HF::org/rows")).left == []


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_there_is_not_asked_for():
    assert drafted(GRPO).left == []
    assert drafted(ROWS).left[0].endswith(f"these rows, {STEPS}")

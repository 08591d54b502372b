"""The files that a user's function consists of, found through their imports."""

from pathlib import Path

import pytest

from tiercel.runs.call_files import files_of_call

FILES = {
    "mine/rw.py": "import json, helper\nfrom more import nested\n",
    "mine/helper.py": "import rw\ndef late():\n    import lazy\n",
    "mine/lazy.py": "(",
    "mine/other.py": "",
    "mine/more/__init__.py": "",
    "mine/more/nested.py": "from . import near\nfrom .far import x\nfrom ..helper import late\n",
    "mine/more/near.py": "",
    "mine/more/far.py": "import json",
    "mine/json.py/readme": "",
}
BESIDE = ["helper.py", "lazy.py", "more/__init__.py", "more/far.py", "more/near.py", "more/nested.py", "rw.py"]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


def names(call: str, root: Path) -> list[str]:
    return [path.absolute().relative_to(root).as_posix() for path in files_of_call(call)]


def test_of_a_file_all_that_it_imports_from_beside_it(root):
    assert names("mine/rw.py:score", root) == names(f"{root}/rw.py:score", root) == BESIDE


def test_of_a_module_in_the_working_directory(root, monkeypatch):
    monkeypatch.chdir(root)
    assert names("rw:score", root) == BESIDE
    assert names("more.near:score", root) == ["more/__init__.py", "more/near.py"]


@pytest.mark.parametrize("call", ("json:loads", "none.py:score", "zoom", "", "torch.nn:Linear"))
def test_of_others_none(root, call):
    assert files_of_call(call) == []

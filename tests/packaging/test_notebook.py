"""The notebook: it is stored without outputs; run with the installed wheel, it shows its pictures, and its run
learns."""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

NOTEBOOK = ROOT / "notebooks/demo.ipynb"
LIMIT_SECONDS = 600  # for a cell; all cells take one minute if nothing else runs


def test_it_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) > 10
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_what_it_imports_is_there():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tiercel"):
            module = import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.notebook
def test_its_parts_run_and_its_policy_learns(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = "import tiercel\nprint(json.dumps([tiercel.__file__, first['eval/reward/mean'], last['eval/reward/mean']]))"
    notebook.cells.append(nbformat.v4.new_code_cell(code))
    NotebookClient(notebook, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 5
    where, before, after = json.loads(outputs[-1]["text"])
    assert Path(where).is_relative_to(Path(sys.executable).parents[1])
    assert after > before + 0.05

"""The notebooks: they are stored without outputs; run with the installed wheel, they show their pictures, and their
runs learn."""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_SECONDS = 600  # for a cell; all cells of a notebook take a minute if nothing else runs
LARGEST_BYTES = 20_000
# For each: what its last cell prints, the figure before and after training and the least rise, and its pictures.
SHOWN = {
    "demo": ("[first['eval/reward/mean'], last['eval/reward/mean']]", 0.05, 5),
    "own-reward": ("[before, after]", 0.1, 3),
    "preferences": ("[row['eval/margin'] for row in run.metrics if 'eval/margin' in row]", 0.01, 1),
    "loop": ("[curve[0], curve[-1]]", 0.05, 1),
}


def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def test_every_notebook_is_run():
    assert {notebook.stem for notebook in NOTEBOOKS} == SHOWN.keys()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_is_kept_without_outputs(notebook):
    assert notebook.stat().st_size < LARGEST_BYTES
    cells = cells_of(notebook)
    assert len(cells) >= 8
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_what_it_imports_is_there(notebook):
    code = "\n".join("".join(cell["source"]) for cell in cells_of(notebook) if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tiercel"):
            module = import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.notebook
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_its_cells_run_and_its_policy_learns(notebook, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    code, least_rise, least_pictures = SHOWN[notebook.stem]
    cells = nbformat.read(notebook, as_version=4)
    cells.cells.append(
        nbformat.v4.new_code_cell(f"import json, tiercel\nprint(json.dumps([tiercel.__file__, *{code}]))")
    )
    NotebookClient(cells, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= least_pictures
    where, before, *_, after = json.loads(outputs[-1]["text"])
    assert Path(where).is_relative_to(Path(sys.executable).parents[1])
    assert after > before + least_rise

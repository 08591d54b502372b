"""The canaries can fire: a reader that unpickles, imports or evaluates runs their command."""

import subprocess
import sys

import pytest

from benchmarks.faults.payloads import Canary

READERS = {
    "pickled": "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))",
    "pickled_binary": "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))",
    "numpy_file": "import numpy, sys; numpy.load(sys.argv[1], allow_pickle=True)",
    "torch_file": "import pickle, sys, zipfile; pickle.loads(zipfile.ZipFile(sys.argv[1]).read('archive/data.pkl'))",
    "module": "import runpy, sys; runpy.run_path(sys.argv[1])",
    "expression": "import sys; eval(open(sys.argv[1]).read())",
}


@pytest.mark.parametrize("name", READERS)
def test_a_careless_reader_makes_the_canarys_file(tmp_path, name):
    canary = Canary(file=tmp_path / "canary")
    payload = getattr(canary, name)()
    file = tmp_path / "payload"
    file.write_bytes(payload.encode() if isinstance(payload, str) else payload)
    subprocess.run([sys.executable, "-c", READERS[name], str(file)], capture_output=True, check=False)
    assert canary.file.exists()


def test_a_template_without_a_sandbox_reaches_the_shell(tmp_path):
    canary = Canary(file=tmp_path / "canary")
    (template,) = (text for text in canary.templates() if "cycler.__init__.__globals__.os.popen" in text)
    program = "import jinja2, sys; jinja2.Template(sys.argv[1]).render()"
    subprocess.run([sys.executable, "-c", program, template], capture_output=True, check=False)
    assert canary.file.exists()

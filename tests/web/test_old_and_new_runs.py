"""A run of before, with PNG files and plain lines, and the same run as it is written now are read alike."""

import re
import shutil

import httpx
import pytest
from PIL import Image

from tests.web.report.fake_runs import make_grounding
from tests.web.view.serving import served
from tiercel.runs.step_files import pack_step
from tiercel.web.report import write_report

STEPS = 4
DATA = re.compile(r"data:image/webp;base64,[A-Za-z0-9+/=]+")


@pytest.fixture
def runs(tmp_path):
    """The run as it was, and as it is now."""
    before = make_grounding(tmp_path / "before" / "run", steps=STEPS, rows=4)
    now = tmp_path / "now" / "run"
    shutil.copytree(before, now)
    for file in (now / "images").glob("*.png"):
        Image.open(file).save(file.with_suffix(".webp"), lossless=True)
        file.unlink()
    for step in range(STEPS + 1):
        pack_step(now, step)
    assert list(before.rglob("*.png")) and not list(now.rglob("*.png")) and list(now.rglob("*.jsonl.zst"))
    return before, now


def test_the_report_has_the_same_words_and_as_many_pictures(runs):
    before, now = (write_report(run).read_text().replace(str(run), "RUN") for run in runs)
    assert DATA.sub("", before) == DATA.sub("", now)
    assert len(DATA.findall(before)) == len(DATA.findall(now)) > 0


def test_the_page_has_the_same_parts_and_pictures(runs, tmp_path):
    found = []
    for number, run in enumerate(runs):
        with served(run.parent, state=tmp_path / f"state-{number}") as page:
            picture = next(file.stem for file in sorted((run / "images").iterdir()))
            parts = ("heldout", "cards", f"images/{picture}")
            answers = [httpx.get(f"{page.root}/{part}", params={"run": "run"}) for part in parts]
            said = [answer.text.replace(page.token, "") for answer in answers[:2]]
            found.append((said, [(answer.status_code, answer.headers["content-type"]) for answer in answers]))
    assert found[0] == found[1] and {code for code, _ in found[0][1]} == {200}
    assert f"images/{picture}" in "".join(found[0][0]) and found[0][1][2][1] == "image/webp"

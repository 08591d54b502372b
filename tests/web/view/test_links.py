"""Links that somebody has put into a run: the page names the file and does not show what it leads to."""

import json

import httpx
import pytest

from tests.web.report.fake_runs import make_grounding, make_sft
from tests.web.view.serving import served

KEY = "the-key-of-somebody"
PARTS = ("", "curves", "cards", "heldout", "summary", "rows", "ranks", "log", "details", "row", "compare")
NAMES = (
    *("log.txt", "metrics.jsonl", "end.json", "env.json", "bad_rows.jsonl", "index.jsonl"),
    *("pulse/rank-0.json", "stall/step-000001/message.txt", "evaluations/step-000000.jsonl"),
)


def linked(name: str) -> str:
    return name.replace("/", "-")


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    key = tmp_path_factory.mktemp("elsewhere") / "key"
    key.write_text(f'{KEY}\n{{"id": "{KEY}", "reason": "{KEY}", "exit_code": 3, "step": 1, "files": {{}}}}\n')
    return key


@pytest.fixture(scope="module")
def page(key, tmp_path_factory):
    """A page of a run for each of NAMES, in which it is a link, and of one without."""
    runs = tmp_path_factory.mktemp("runs")
    make_sft(runs / "whole", steps=3)
    for name in NAMES:
        make_sft(runs / linked(name), steps=3)
        file = runs / linked(name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(key)
    with served(runs, state=tmp_path_factory.mktemp("state")) as page, httpx.Client(base_url=page.root) as client:
        yield client


@pytest.mark.parametrize("name", (*NAMES, None))
def test_a_link_in_a_run_shows_nothing_of_elsewhere(page, key, name):
    run = "whole" if name is None else linked(name)
    answers = [page.get(f"/{part}", params={"run": run}) for part in PARTS]
    assert any(answer.status_code == 200 for answer in answers)
    assert all(KEY not in answer.text and answer.status_code != 500 for answer in answers)
    told = [answer.text for answer in answers if answer.status_code == 503]
    assert not told if name is None else all(name in text for text in told)
    assert key.read_text().startswith(KEY)


@pytest.mark.parametrize("name", ("rollouts", "images"))
def test_a_folder_that_is_a_link_is_named_and_shows_nothing_of_elsewhere(tmp_path, name):
    run = make_grounding(tmp_path / "run", steps=2, rows=4)
    picture = next((run / "images").glob("*.png")).stem
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    words = (
        json.loads((tmp_path / name / "step-000001.jsonl").read_text().split("\n")[0])["id"]
        if name == "rollouts"
        else ""
    )
    with served(run, state=tmp_path / "state") as page:
        answers = [httpx.get(f"{page.root}/{part}", params={"run": "run", "folder": name}) for part in PARTS]
        assert all(answer.status_code in (200, 400, 404, 503) for answer in answers)
        assert f"{name} is a link, which is not followed" in "".join(answer.text for answer in answers)
        assert not words or words not in "".join(answer.text for answer in answers)
        assert httpx.get(f"{page.root}/images/{picture}", params={"run": "run"}).status_code == (
            404 if name == "images" else 200
        )

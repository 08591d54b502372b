"""What `make site` has built: the pages, the types, the search, and that a broken link ends the build."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs.links import main

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
TYPES = {
    "chain": ("Row", "EncodedPrompt", "Completion", "Trajectory", "ScoredGroup"),
    "rewards": ("Sample", "SampleImage", "PolicyTurn", "answer_of", "extract_answer", "Reward"),
    "losses": ("LossInput", "LossOutput", "TokenTerms", "RewardTable", "policy_loss"),
    "models": ("Family",),
    "parts": ("Sampler", "Strategy", "Tracker"),
    "environments": ("EnvironmentAnswer", "Dialogue"),
    "recipe": ("GrpoRecipe", "Model", "Lora", "Rollout", "load_recipe"),
    "errors": ("TiercelError", "RecipeError"),
}


def test_every_document_has_a_page():
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= {path.relative_to(SITE) for path in SITE.rglob("*.html")}


@pytest.mark.parametrize("page", TYPES)
def test_the_types_of_a_page_are_found_in_the_source(page):
    text = (SITE / "api" / f"{page}.html").read_text(encoding="utf-8")
    for name in TYPES[page]:
        assert f'.{name}" class="doc doc-heading"' in text, name


def test_a_comment_behind_a_field_is_its_text():
    text = (SITE / "api" / "chain.html").read_text(encoding="utf-8")
    assert "&lt;bbox&gt;</code> marks; in pixels of the original image." in text
    assert "Counted from 1." in text


@pytest.mark.parametrize(
    "words",
    (
        "Image features and image tokens do not match",
        "pop from an empty deque",
        "Watchdog caught collective operation timeout",
        "operator torchvision::nms does not exist",
    ),
)
def test_the_search_has_the_texts_of_errors(words):
    items = json.loads((SITE / "search.json").read_text(encoding="utf-8"))["items"]
    assert any(item["location"].startswith("failures/") and words in item["title"] for item in items)


@pytest.mark.parametrize("link", ("gone.md", "index.md#gone"))
def test_a_broken_link_ends_the_build(tmp_path, link):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[here]({link})\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "t"\nsite_dir = "site"\n')
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "does not exist" in done.stdout + done.stderr


def test_a_page_that_leads_nowhere_is_found_in_what_was_built(tmp_path):
    (tmp_path / "index.html").write_text('<h1 id="a">A</h1><a href="#a">a</a><a href="gone.html">gone</a>')
    assert main([str(tmp_path)]) == 1

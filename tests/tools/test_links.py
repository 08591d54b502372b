"""The link check finds missing files and headings, and what a page loads from elsewhere."""

import pytest

from tools.docs.links import check, main, slug


def site(folder, body):
    """A site of one page, with a style of its own."""
    folder.mkdir()
    (folder / "style.css").write_text("p { color: red }")
    (folder / "index.html").write_text(
        f'<link rel="stylesheet" href="style.css"><h1 id="top">A</h1><div id="deep"></div>{body}'
    )
    return folder


@pytest.mark.parametrize(
    ("body", "problem"),
    (
        ('<a href="gone.html">x</a>', "gone.html leads to no file"),
        ('<a href="/gone.html">x</a>', "/gone.html leads to no file"),
        ('<a href="#gone">x</a>', "#gone leads to no heading"),
        ('<a href="index.html#gone">x</a>', "index.html#gone leads to no heading"),
        ('<img src="gone.png">', "gone.png leads to no file"),
        ('<a href="https://exa mple.org">x</a>', "https://exa mple.org is no address"),
        ('<a href="https:/example.org">x</a>', "https:/example.org is no address"),
        ('<a href="ftp://example.org">x</a>', "ftp://example.org has an unknown scheme"),
        ('<script src="https://example.org/a.js"></script>', "https://example.org/a.js is loaded from the network"),
        (
            '<link rel="stylesheet" href="https://example.org/a.css">',
            "https://example.org/a.css is loaded from the network",
        ),
        ('<pre class="mermaid">a</pre>', "the class mermaid lets the page load a program from the network"),
    ),
)
def test_a_page_is_told_what_is_wrong(tmp_path, body, problem):
    folder = site(tmp_path / "site", body)
    files, _, found = check(folder, ())
    assert files == 1 and found == [f"{folder}/index.html: {problem}"]
    assert main([str(folder)]) == 1


def test_what_leads_somewhere_passes(tmp_path, capsys):
    body = (
        '<a href="#deep">a</a><a href="/index.html#top">b</a><a href="https://example.org/a?b#c">c</a><a href=".">d</a>'
    )
    assert main([str(site(tmp_path / "site", body))]) == 0
    assert capsys.readouterr().out == "5 links in 1 files lead where they should\n"


def test_a_style_may_not_load_a_font(tmp_path):
    folder = site(tmp_path / "site", "")
    (folder / "style.css").write_text("@font-face { src: url('https://example.org/a.woff') }")
    assert check(folder, ())[2] == [f"{folder}/style.css: loads from the network"]


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ("[a](docs/a.md) [b](docs/a.md#the-answer-x) [c](#here) ![d](docs)", ()),
        ("`[a](gone.md)`\n\n```text\n[b](gone.md)\n```\n", ()),
        ("[a](gone.md)", ("gone.md leads to no file",)),
        ("[a](docs/a.md#gone)", ("docs/a.md#gone leads to no heading",)),
        ("[a](#gone)", ("#gone leads to no heading",)),
    ),
)
def test_a_document_beside_the_site(tmp_path, text, found):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A\n\n## The answer: `x`\n")
    (tmp_path / "README.md").write_text(f"# Here\n\n{text}\n")
    problems = check(site(tmp_path / "site", ""), (tmp_path / "README.md",))[2]
    assert problems == [f"{tmp_path}/README.md: {each}" for each in found]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    (
        ("Where the adapter starts: `lora.start: loftq`", "where-the-adapter-starts-lorastart-loftq"),
        ("Your own **loss**", "your-own-loss"),
        ("See [the page](a.md)", "see-the-page"),
        ("奖励是 NaN", "奖励是-nan"),
    ),
)
def test_anchors_are_those_of_github(heading, anchor):
    assert slug(heading) == anchor

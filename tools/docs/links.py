"""Check the links of the built site, and of the documents next to it.

    python -m tools.docs.links site README.md CONTRIBUTING.md

A link within the project must lead to a file, and its anchor to a heading or an id there. For a link to the network,
only the form is checked. Nothing that a page loads may come from the network.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESS = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(:\d+)?([/?#]\S*)?")
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
NOT_LOADED = {"canonical", "alternate", "next", "prev", "author", "license"}  # values of rel
BY_NETWORK = {"mermaid", "glightbox", "pyodide"}  # classes for which the theme's program loads another one
CSS_ADDRESS = re.compile(r"url\(\s*[\"']?https?:|@import\s+[\"']https?:")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)


@dataclass(slots=True)
class Page:
    """What the checks need from a page: its ids, the targets of its links, and what it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    """Fills a page from HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.page.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        self.page.classes |= set(values.get("class", "").split())
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        elif (address := values.get(LOADED.get(tag, ""))) and not NOT_LOADED & set(values.get("rel", "").split()):
            self.page.loaded.append(address)


@cache
def read_page(file: Path) -> Page:
    """Read an HTML or Markdown file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".md":
        reader = _Reader()
        reader.feed(text)
        return reader.page
    text = FENCE.sub("", text)
    ids = {slug(heading) for heading in HEADING.findall(text)}
    return Page(ids=ids, links=LINK.findall(CODE.sub("", text)))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.lower().strip()).replace(" ", "-")


def problems_of(file: Path, root: Path) -> Iterator[str]:
    """Yield one line for each problem with the links of a file. Links that begin with a slash start at `root`."""
    page = read_page(file)
    for address in page.links + page.loaded:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https"):
            if address in page.loaded:
                yield f"{file}: {address} is loaded from the network"
            elif not ADDRESS.fullmatch(address):
                yield f"{file}: {address} is no address"
        elif not parts.scheme and (problem := _problem_within(file, root, parts.path, unquote(parts.fragment))):
            yield f"{file}: {address} {problem}"
        elif parts.scheme not in ("", "data", "mailto"):
            yield f"{file}: {address} has an unknown scheme"
    for name in sorted(BY_NETWORK & page.classes):
        yield f"{file}: the class {name} lets the page load a program from the network"


def _problem_within(file: Path, root: Path, path: str, anchor: str) -> str | None:
    """Return what is wrong with a link to a file of the project, or None if it is right."""
    base = root if path.startswith("/") else file.parent
    target = (base / unquote(path).lstrip("/")).resolve() if path else file
    if target.is_dir() and (target / "index.html").is_file():
        target = target / "index.html"
    if not target.exists():
        return "leads to no file"
    is_page = target.suffix in (".html", ".md")
    return "leads to no heading" if anchor and is_page and anchor not in read_page(target).ids else None


def check(site: Path, documents: Sequence[Path]) -> tuple[int, int, list[str]]:
    """Return the numbers of files and of links, and all problems."""
    files = [*sorted(site.rglob("*.html")), *documents]
    pages = [read_page(file) for file in files]
    found = [problem for file in files for problem in problems_of(file, site)]
    styles = (file for file in sorted(site.rglob("*.css")) if CSS_ADDRESS.search(file.read_text(encoding="utf-8")))
    found += [f"{file}: loads from the network" for file in styles]
    return len(files), sum(len(page.links) + len(page.loaded) for page in pages), found


def main(words: Sequence[str] | None = None) -> int:
    """Print what is wrong, or how much was checked, and return the exit code."""
    parser = argparse.ArgumentParser(description="check the links of the built site and of documents")
    parser.add_argument("site", type=Path)
    parser.add_argument("documents", type=Path, nargs="*")
    given = parser.parse_args(words)
    files, links, found = check(given.site, given.documents)
    print("\n".join(found) or f"{links:,} links in {files} files lead where they should")
    return 1 if found or not links else 0


if __name__ == "__main__":
    sys.exit(main())

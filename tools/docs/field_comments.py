"""An extension of griffe that gives API pages the comments of dataclass fields, which griffe leaves out. zensical.toml
names this file."""

import io
import re
import textwrap
import tokenize

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """Turns the comment at the end of a field's line, as in `page: int  # counted from 1`, into the field's text."""

    def on_attribute(self, *, attr: Attribute, **_: object) -> None:
        """Set the docstring of an attribute that has a comment and no docstring."""
        if attr.docstring is None and (comment := trailing_comment(attr.lines)):
            attr.docstring = Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)


def trailing_comment(lines: list[str]) -> str:
    """Return the text of the last comment in the lines of one statement, or an empty string if there is none."""
    source = textwrap.dedent("\n".join(lines))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return ""
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    text = comments[-1].lstrip("# ").rstrip(".") if comments else ""
    return re.sub(r"<[^<>\s]+>", r"`\g<0>`", text)  # a mark such as <image> is not HTML

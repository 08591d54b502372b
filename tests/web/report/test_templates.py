import pytest

from tiercel.web.report.templates import environment, escaped


def filled(template: str, **values) -> str:
    return environment().from_string(template).render(**values)


def test_text_is_escaped_wherever_it_goes():
    made = filled('<p title="{{ title }}">{{ text }}{{ text ~ 3 }}</p>', title='"<x>\'"', text="<script>&")
    assert made == '<p title="&quot;&lt;x&gt;&#x27;&quot;">&lt;script&gt;&amp;&lt;script&gt;&amp;3</p>'
    assert (
        filled("{% macro m(a) %}<b>{{ a }}</b>{% endmacro %}{{ m(text) }}{{ nothing }}", text="<", nothing=None)
        == "<b>&lt;</b>"
    )
    assert filled("{{ all|join(', ') }}{{ text|clipped(9) }}", all=["<a>", "b"], text="<") == "&lt;a&gt;, b&lt;"


def test_characters_that_no_page_may_hold_are_shown():
    assert escaped("\x00\x1b[1m\x7f\ud800\r\n\tx") == "\u2400\u241b[1m\ufffd\ufffd\n\tx"
    assert escaped("\u202eabc\u2066") == "[U+202E]abc[U+2066]"


@pytest.mark.parametrize("name", environment().list_templates())
def test_no_template_switches_escaping_off(name):
    source, _, _ = environment().loader.get_source(environment(), name)
    assert "safe" not in source.split() and "|safe" not in source and "autoescape" not in source

from tiercel.web.report.markup import element, escaped, fragment


def test_text_is_escaped_wherever_it_goes():
    made = element("p", "<script>", element("b", "a & b"), title='"<x>"', data_step=3)
    assert made == '<p title="&quot;&lt;x&gt;&quot;" data-step="3">&lt;script&gt;<b>a &amp; b</b></p>'


def test_children_may_be_nested_numbers_or_nothing():
    assert element("ul", [element("li", 1), [None, element("li", 2.5)]]) == "<ul><li>1</li><li>2.5</li></ul>"
    assert fragment("a", None, "<") == "a&lt;"


def test_attributes_none_and_false_are_left_out_and_true_is_bare():
    assert element("details", open=True, class_=None, hidden=False) == "<details open></details>"
    assert element("rect", x=1.0, y=2.345, width=3) == '<rect x="1" y="2.3" width="3"/>'


def test_characters_that_no_page_may_hold_are_shown():
    assert escaped("\x00\x1b[1m\x7f\ud800\r\n\tx") == "\u2400\u241b[1m\ufffd\ufffd\n\tx"
    assert escaped("\u202eabc\u2066") == "[U+202E]abc[U+2066]"

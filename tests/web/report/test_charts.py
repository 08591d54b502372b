import re
from xml.etree import ElementTree

from tiercel.web.report.charts import Chart, Series, line_chart, smoothing, stacked_chart


def numbers_in(svg: str, css_class: str) -> list[list[float]]:
    paths = re.findall(rf'<path d="([^"]+)" class="{css_class}', svg)
    return [[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in paths]


def test_a_line_reaches_from_corner_to_corner():
    points = tuple((step, float(step)) for step in range(5))
    chart = line_chart(Chart(title="T", series=(Series(label="l", points=points),)))
    (path,) = numbers_in(chart, "thick")
    assert path[:2] == [46.0, 176.0] and path[-2:] == [370.0, 8.0]
    ElementTree.fromstring(chart)  # well-formed


def test_whiskers_reach_from_low_to_high():
    held_out = Series(
        label="held out",
        points=((0, 0.25), (10, 0.5)),
        style="points",
        whiskers=((0, 0.0, 0.5), (10, 0.25, 1.0)),
    )
    chart = line_chart(Chart(title="T", series=(held_out,), from_zero=True))
    whiskers = numbers_in(chart, "whisker")
    assert whiskers[0][:3] == [46.0, 176.0, 92.0]  # x, low, high
    assert whiskers[1][:3] == [370.0, 134.0, 8.0]
    assert "step 10: 0.500" in chart


def test_of_many_points_few_are_drawn():
    points = tuple((step, float(step == 700)) for step in range(20_000))
    whiskers = tuple((step, value - 0.1, value + 0.1) for step, value in points)
    series = Series(label="held out", points=points, style="points", whiskers=whiskers)
    chart = line_chart(Chart(title="T", series=(series,)))
    dots, drawn = re.findall(r"<title>step ([\d,]+): ", chart), numbers_in(chart, "whisker")
    assert len(dots) == len(drawn) <= 302 and {"0", "700", "19,999"} <= set(dots)
    ElementTree.fromstring(chart)


def test_a_spike_does_not_flatten_the_rest():
    points = tuple((step, 1000.0 if step == 50 else 1.0 + step % 2) for step in range(100))
    chart = line_chart(Chart(title="T", series=(Series(label="l", points=points),), from_zero=True))
    assert "1 beyond the axis, up to 1,000" in chart


def test_degenerate_series_are_drawn():
    for points in (((3, 0.0),), ((1, 2.5), (2, 2.5)), ((1, -1e-12), (2, 1e12)), ((0, -5.0), (1, -5.0))):
        chart = line_chart(Chart(title="<T>", series=(Series(label="l", points=points),)))
        ElementTree.fromstring(chart)
        assert "nan" not in chart and "&lt;T&gt;" in chart


def test_smoothing_is_a_twentieth_of_the_run():
    assert [smoothing(count) for count in (1, 9, 10, 100, 400)] == [1, 1, 3, 5, 20]


def test_layers_lie_on_one_another():
    chart = stacked_chart("Seconds", ["a", "b"], [1, 2], [[1.0, 1.0], [1.0, 3.0]])
    upper, lower = numbers_in(chart, "area")
    assert lower[:4] == [46.0, 134.0, 370.0, 134.0]  # 1 of 4
    assert upper[:4] == [46.0, 92.0, 370.0, 8.0]  # 2 and 4 of 4
    ElementTree.fromstring(chart)

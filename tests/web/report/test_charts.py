"""The numbers of charts; tests/web/view/test_browser.py has what the script draws of them."""

import json
import math

import pytest

from tiercel.web.report.charts import Chart, Series, beyond_note, chart_numbers, first_and_last, smoothing
from tiercel.web.report.templates import environment


def chart_of(*points, **more) -> Chart:
    return Chart(title="T", series=(Series(label="l", points=points),), **more)


def test_a_chart_has_the_points_and_the_range_of_its_axes():
    found = chart_numbers(chart_of(*((step, float(step)) for step in range(5))))
    assert (found["steps"], found["values"]) == ((0, 4), [0.0, 4.0])
    assert found["series"][0]["points"] == [[step, step] for step in range(5)] and "mean" not in found["series"][0]
    assert chart_numbers(chart_of((30, 1.0), (40, 2.0), last_step=50))["steps"] == (30, 50)


def test_whiskers_widen_the_axis():
    points, whiskers = ((0, 0.25), (10, 0.5)), ((0, 0.125, 0.5), (10, 0.25, 1.0))
    series = Series(label="held out", points=points, style="points", whiskers=whiskers)
    found = chart_numbers(Chart(title="T", series=(series,), from_zero=True))
    assert found["series"][0]["whiskers"] == [list(each) for each in whiskers] and found["values"] == [0.0, 1.0]


def test_of_many_points_few_are_drawn():
    points = tuple((step, float(step == 700)) for step in range(20_000))
    whiskers = tuple((step, value - 0.1, value + 0.1) for step, value in points)
    series = Series(label="held out", points=points, style="points", whiskers=whiskers)
    (found,) = chart_numbers(Chart(title="T", series=(series,)))["series"]
    assert len(found["points"]) == len(found["whiskers"]) <= 302
    assert {0, 700, 19_999} <= {step for step, _ in found["points"]}
    (line,) = chart_numbers(chart_of(*points))["series"]
    assert len(line["mean"]) <= 302


def test_a_spike_does_not_flatten_the_rest():
    chart = chart_of(*((step, 1000.0 if step == 50 else 1.0 + step % 2) for step in range(100)), from_zero=True)
    assert beyond_note(chart) == "1 beyond the axis, up to 1,000" and chart_numbers(chart)["values"][1] < 3


@pytest.mark.parametrize(
    "points", [((3, 0.0),), ((1, 2.5), (2, 2.5)), ((1, -1e-12), (2, 1e12)), ((0, -5.0), (1, -5.0))]
)
def test_degenerate_series_have_axes(points):
    found = chart_numbers(chart_of(*points))
    for low, high in (found["steps"], found["values"]):
        assert low < high and math.isfinite(high - low)


def test_titles_and_labels_are_text():
    made = (
        environment()
        .get_template("pieces.html")
        .module.figure(Chart(title="<T>", series=(Series(label="</script>\"'<b>", points=((1, 1.0),)),)))
    )
    assert "&lt;T&gt;" in made and "<b>" not in made and "</script>" not in made and "\"'" not in made


def test_smoothing_is_a_twentieth_of_the_run():
    assert [smoothing(count) for count in (1, 9, 10, 100, 400)] == [1, 1, 3, 5, 20]


def test_layers_are_as_high_as_their_sum():
    layers = (((1, 1.0), (2, 1.0)), ((1, 1.0), (2, 3.0)))
    chart = Chart(title="T", series=tuple(Series(label="l", points=each) for each in layers), is_layered=True)
    assert chart_numbers(chart)["values"] == [0.0, 4.0] and first_and_last(chart) == ("2.00 → 4.00", "first and last")
    json.dumps(chart_numbers(chart), allow_nan=False)

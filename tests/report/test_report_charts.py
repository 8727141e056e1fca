"""Charts: every line inside its frame, readable axes, lines that can be told apart, and a text alternative."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from fedcdp.report.charts import Series, coincident, keys, line_chart

VALUES = st.floats(min_value=1e-6, max_value=1e9)


def drawn(points: list[tuple[float, float]], log: bool) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart([Series("a <b>", "m d0", points)], "Title & more", "x", "y", log=log))


@given(values=st.lists(VALUES, min_size=1, max_size=20), log=st.booleans())
def test_every_point_and_label_lies_inside_the_picture(values: list[float], log: bool) -> None:
    chart = drawn([(float(at + 1), value) for at, value in enumerate(values)], log)
    (line,) = [each for each in chart if each.tag == "polyline"]
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(places) == len(values)
    assert all(50 <= x <= 410 and 10 <= y <= 230 for x, y in places)
    labels = [each for each in chart if each.tag == "text" and "x" in each.attrib]
    assert all(0 <= float(each.attrib["x"]) <= 420 and 0 <= float(each.attrib["y"]) <= 270 for each in labels)


@given(values=st.lists(VALUES, min_size=2, max_size=20), log=st.booleans())
def test_labels_of_the_upright_axis_do_not_overlap(values: list[float], log: bool) -> None:
    chart = drawn([(float(at), value) for at, value in enumerate(values)], log)
    places = sorted(float(each.attrib["y"]) for each in chart if each.attrib.get("text-anchor") == "end")
    assert len(places) >= 2
    assert all(later - earlier >= 12 for earlier, later in itertools.pairwise(places))


def test_a_wide_range_gets_a_logarithmic_axis_and_a_narrow_one_does_not() -> None:
    assert "log scale" in line_chart([Series("a", "m", [(1, 0.1), (2, 1000)])], "t", "x", "ε", log=True)
    assert "log scale" not in line_chart([Series("a", "m", [(1, 2.0), (2, 3.0)])], "t", "x", "ε", log=True)


@given(rates=st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=20, unique=True))
def test_a_logarithmic_horizontal_axis_keeps_points_and_labels_inside(rates: list[float]) -> None:
    points = [(rate, rate) for rate in sorted(rates)]
    chart = ElementTree.fromstring(line_chart([Series("a", "m", points)], "t", "x", "y", log=True, log_x=True))
    (line,) = [each for each in chart if each.tag == "polyline"]
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert all(50 <= x <= 410 and 10 <= y <= 230 for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    labels = [float(each.attrib["x"]) for each in chart if each.tag == "text" and "x" in each.attrib]
    assert all(0 <= x <= 420 for x in labels)


def test_on_logarithmic_axes_decades_are_equally_far_apart() -> None:
    points = [(1e-4, 1e-3), (1e-3, 1e-2), (1e-2, 0.1), (0.1, 1.0)]
    chart = line_chart([Series("a", "m", points)], "t", "rate", "y", log=True, log_x=True)
    assert "rate, log scale" in chart
    (line,) = [each for each in ElementTree.fromstring(chart) if each.tag == "polyline"]
    xs = [float(pair.split(",")[0]) for pair in line.attrib["points"].split()]
    assert {round(later - earlier) for earlier, later in itertools.pairwise(xs)} == {118}


def test_the_words_tell_where_each_line_begins_and_ends() -> None:
    chart = line_chart([Series("one", "m", [(1, 0.5), (9, 0.75)])], "Accuracy", "round", "accuracy")
    assert re.search(r"<desc>one: 0.5 at 1, 0.75 at 9</desc>", chart)


RISING = [(1.0, 1.0), (2.0, 2.0), (3.0, 2.5)]


def test_lines_on_each_other_have_dashes_and_marks_in_turns() -> None:
    series = [Series("a", "m1", RISING, 0), Series("b", "m2", RISING, 1), Series("c", "m3", [(1, 3.0), (3, 3.0)], 2)]
    assert [[each.name for each in group] for group in coincident(series)] == [["a", "b"]]
    chart = ElementTree.fromstring(line_chart(series, "t", "x", "y"))
    styles = [each.attrib.get("style") for each in chart if each.tag == "polyline"]
    assert styles == ["stroke-dasharray:14 14;stroke-dashoffset:0", "stroke-dasharray:14 14;stroke-dashoffset:-14", None]
    marks = [each.attrib["transform"] for each in chart if each.tag == "path"]
    assert len(marks) > 3
    assert len(set(marks)) == len(marks)
    assert len({each.attrib["d"] for each in chart if each.tag == "path"}) == 3
    assert [each.name for each, _ in keys(series)] == ["a", "b", "c"]


@given(values=st.lists(VALUES, min_size=2, max_size=20), others=st.lists(VALUES, min_size=2, max_size=20))
def test_lines_coincide_only_where_they_cannot_be_told_apart(values: list[float], others: list[float]) -> None:
    one, other = ([(float(at), value) for at, value in enumerate(each)] for each in (values, others))
    chart = ElementTree.fromstring(line_chart([Series("a", "m", one), Series("b", "m", other)], "t", "x", "y"))
    paths = [
        [float(pair.split(",")[1]) for pair in each.attrib["points"].split()] for each in chart if each.tag == "polyline"
    ]
    apart = max(abs(a - b) for a, b in zip(*paths, strict=False))
    if coincident([Series("a", "m", one), Series("b", "m", other)]):
        assert apart < 2.2
    else:
        assert apart > 1.8


def test_lines_that_share_one_point_do_not_coincide() -> None:
    assert coincident([Series("a", "m", [(1, 1.0), (2, 2.0)]), Series("b", "m", [(2, 2.0), (3, 1.0)])]) == []


def test_single_points_on_each_other_do() -> None:
    assert len(coincident([Series("a", "m", [(1, 1.0)]), Series("b", "m", [(1, 1.0)])])) == 1


def test_the_upright_axis_begins_near_values_far_from_zero() -> None:
    labels = re.findall(r'text-anchor="end">([\d.]+)<', line_chart([Series("a", "m", [(1, 0.7), (9, 0.97)])], "t", "x", "y"))
    assert 0 < float(min(labels)) <= 0.7


def test_without_a_point_there_is_no_chart() -> None:
    assert line_chart([Series("one", "m", [])], "Accuracy", "round", "accuracy") == ""

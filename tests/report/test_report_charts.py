"""Charts: every line inside its frame, axes that can be read, and words for whoever cannot see them."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from fedcdp.report.charts import Series, line_chart

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


def test_the_words_tell_where_each_line_begins_and_ends() -> None:
    chart = line_chart([Series("one", "m", [(1, 0.5), (9, 0.75)])], "Accuracy", "round", "accuracy")
    assert re.search(r"<desc>one: 0.5 at 1, 0.75 at 9</desc>", chart)


def test_without_a_point_there_is_no_chart() -> None:
    assert line_chart([Series("one", "m", [])], "Accuracy", "round", "accuracy") == ""

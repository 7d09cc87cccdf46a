"""The chart writer."""

import xml.etree.ElementTree as ET

import pytest
from benchmarks.bars import Bar, draw_bars

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_share_one_scale_and_name_their_values():
    chart = ET.fromstring(draw_bars("Refit <7B>", "ms", [Bar("vLLM", 112.0), Bar("ours & ours", 8.0, ours=True)]))
    long, short = [float(bar.attrib["width"]) for bar in chart.findall(f"{SVG}rect")[1:]]
    assert short / long == pytest.approx(8 / 112, rel=0.01)
    assert [text.text for text in chart.iter(f"{SVG}text")] == ["Refit <7B>", "vLLM", "112 ms", "ours & ours", "8 ms"]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no bar above zero"):
        draw_bars("empty", "ms", [])

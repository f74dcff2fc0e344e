"""Areas that are stacked over moments, as text and as HTML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from splitjax.display import Areas, Band, Document, Panel, Stretch, html, show
from splitjax.display.areas import columns
from splitjax.display.areas_svg import areas_svg

STRIP = (Stretch(0, 1, ("forward",)), Stretch(1, 3, ("backward",)))
TALL = Panel("tall", (Band("still", (40.0, 40.0, 40.0)), Band("<more>", (0.0, 60.0, 20.0))), "below", 1, STRIP)
FLAT = Panel("flat", (Band("still", (40.0,)),), "below it")
AREAS = Areas((TALL, FLAT), ((0.0, "0 B"), (50.0, "50 B")), 120.0)


def test_a_letter_for_each_band_and_a_mark_at_the_peak():
    lines = show(Document("", (AREAS,)), 40).splitlines()
    assert max(map(len, lines)) <= 40
    drawn = [line.partition("|")[2] for line in lines if "|" in line][:12]
    assert [row.count("A") for row in drawn] == [0] * 8 + [len(drawn[-1])] * 4  # 40 of 120: a third of the height
    tallest = next(row for row in drawn if "B" in row)
    assert set(tallest) == {" ", "B"} and tallest.strip() == "B" * tallest.count("B")
    strip = next(line for line in lines if "f" in line and "b" in line and set(line) <= set(" fb"))
    mark = next(line for line in lines if "peak" in line)
    assert strip[mark.index("^")] == "b"
    assert lines[-1] == "A still, B <more>"
    assert sum("50 B |" in line for line in lines) == 2


def test_all_panels_have_one_height_and_names_are_escaped():
    page = html(Document("", (AREAS,)))
    assert page.count("<svg") == 2 and "&lt;more&gt;" in page and "<more>" not in page
    points = [re.findall(r'points="([^"]+)"', part) for part in page.split("<svg")[1:]]
    tops = [min(float(point.split(",")[1]) for point in bands[0].split()) for bands in points]
    assert tops[0] == tops[1] == round(100 - 100 * 40 / 120, 2)


def test_no_peak_is_lost_where_many_moments_share_a_column():
    levels = [1.0] * 1000
    levels[617] = 9.0
    kept = columns(Panel("many", (Band("a", tuple(levels)),)), 10)
    assert len(kept) == 10 and 617 in kept
    assert columns(Panel("few", (Band("a", (1.0, 2.0)),)), 10) == (0, 1)


SVG = "{http://www.w3.org/2000/svg}"


def test_a_file_of_its_own_has_the_shapes_of_the_page_and_its_words():
    text = areas_svg(AREAS, "a <title>")
    shapes = lambda written: re.findall(r'points="([^"]+)"', written)
    assert shapes(text) == shapes(html(Document("", (AREAS,))))
    root = ET.fromstring(text)
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert words[0] == root.get("aria-label") == "a <title>" and {"tall", "below", "flat", "below it"} < set(words)
    assert words.count("50 B") == 2 and words[-2:] == ["still", "<more>"] and "backward" in words
    # Every panel has its place, and so do the ticks beside it: half of the amounts up, 50 of 120.
    first, second = root.findall(f"{SVG}svg")
    top, height = float(first.get("y")), float(first.get("height"))
    assert float(second.get("y")) > top + height
    tick = next(each for each in root.iter(f"{SVG}text") if each.text == "50 B")
    assert abs(float(tick.get("y")) - 4 - (top + height * (1 - 50 / 120))) < 0.1
    strip = [each for each in root.findall(f"{SVG}rect") if each.get("height") == "15"]
    start, width = float(strip[1].get("x")), float(strip[1].get("width"))
    assert abs((start - float(first.get("x"))) / float(first.get("width")) - 1 / 3) < 0.001
    assert abs(width / float(first.get("width")) - 2 / 3) < 0.001


def test_keys_that_have_no_room_go_on_in_the_next_row():
    bands = tuple(Band(f"params/a_layer_with_a_long_name_{number}", (1.0,)) for number in range(9))
    root = ET.fromstring(areas_svg(Areas((Panel("wide", bands),), ((0.0, "0 B"),), 9.0), "many"))
    _, _, width, height = map(float, root.get("viewBox").split())
    keys = [each for each in root.findall(f"{SVG}text") if each.text.startswith("params/")]
    assert len({each.get("y") for each in keys}) > 1 and len(keys) == 9
    assert all(float(each.get("x")) + 6 * len(each.text) < width and float(each.get("y")) < height for each in keys)

"""The registry of documents: which function shows a value, what an unregistered value prints, and what importing and
registering load."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from splitjax import display
from splitjax.display import Document, Paragraph, registry
from splitjax.errors import SplitjaxError


@dataclasses.dataclass(frozen=True)
class Parcel:
    name: str

    def __str__(self) -> str:
        return display.show(self)

    def _repr_html_(self) -> str:
        return display.html(self)


class Letter(Parcel):
    pass


@pytest.fixture(autouse=True)
def entries(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


def labelled(parcel):
    return Document("a parcel", (Paragraph(f"to {parcel.name}"),))


def test_a_value_that_nobody_registered_prints_its_repr():
    assert str(Parcel("<Ann>")) == "Parcel(name='<Ann>')" and display.document(Parcel("Ann")) is None
    assert Parcel("<Ann>")._repr_html_() == "<pre>Parcel(name=&#x27;&lt;Ann&gt;&#x27;)</pre>"
    with pytest.raises(SplitjaxError, match="nothing draws a Parcel"):
        display.draw(Parcel("Ann"), None)


@pytest.mark.parametrize("kind", [Parcel, f"{__name__}.Parcel"], ids=["type", "name"])
def test_the_nearest_registered_base_shows_a_value(kind):
    display.register(kind, labelled)
    assert str(Letter("Ann")) == "a parcel\n\nto Ann"
    display.register(Letter, lambda letter: Document("a letter", ()))
    assert str(Letter("Ann")) == "a letter" and str(Parcel("Ann")).startswith("a parcel")
    assert "<p>to Ann</p>" in Parcel("Ann")._repr_html_()


def test_pictures_are_drawn_by_what_is_registered():
    display.register(Parcel, labelled, draw=lambda parcel, path: (parcel.name, path))
    assert display.draw(Letter("Ann"), "a.png") == ("Ann", "a.png")


def test_a_document_that_shows_itself():
    shown = display.Shown(labelled(Parcel("<Ann>")))
    assert repr(shown) == "<a parcel; print it for the tables>"
    assert str(shown) == "a parcel\n\nto <Ann>" and "<p>to &lt;Ann&gt;</p>" in shown._repr_html_()
    assert display.document(shown) is shown.document and display.show(shown, 5).startswith("a\nparc")


def test_a_page_is_whole():
    display.register(Parcel, labelled)
    page = display.page(display.html(Parcel("Ann")), "<parcels>")
    assert page.startswith("<!doctype html>") and "<title>&lt;parcels&gt;</title>" in page
    assert 'content="light dark"' in page and 'content="width=device-width' in page and "to Ann" in page


def test_values_register_with_splitjax_and_load_no_layout():
    """In a process of its own: neither the layouts, rich, nor a document is loaded before something is shown."""
    script = """
import sys, splitjax
from splitjax.display import registry
print(sorted(name.rpartition(".")[2] for name in registry._ENTRIES))
print([name for name in sys.modules if name.startswith("splitjax.") and "layout" in name.rpartition(".")[2].split("_")])
print([name for name in sys.modules if name.startswith("splitjax.report") and "document" in name])
print("rich" in sys.modules, "matplotlib" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    kinds = ["Advice", "Calibration", "Choice", "Explanation", "MemoryTimelines", "Plan", "Profile", "ProgramMemory"]
    kinds += ["Remedies", "Report", "Solution", "StepTime", "TargetCheck", "TradeOff"]
    assert found.stdout.splitlines() == [str(kinds), "[]", "[]", "False False"]

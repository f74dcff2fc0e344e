"""What a release needs beside the code: who to cite, what changed, how to report, and a README that reads the same
where no page lies beside it."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

import splitjax

ROOT = pathlib.Path(__file__).resolve().parents[2]
yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.one_version


def test_the_citation_names_this_version_and_the_papers_of_the_docs():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    assert citation["version"] == splitjax.__version__
    cited = {re.search(r"\d{4}\.\d{4,5}", paper["url"])[0] for paper in citation["references"]}
    for page in ("splitbrain", "sparse", "partial_backpropagation"):
        assert cited & set(re.findall(r"\d{4}\.\d{4,5}", (ROOT / "docs" / f"{page}.md").read_text())), page
    for paper in citation["references"]:
        assert paper["title"] and paper["year"] and all(author["family-names"] for author in paper["authors"])
        for page in re.findall(r"docs/\w+\.md", paper["notes"]):
            assert (ROOT / page).exists()


def test_the_changes_are_kept_by_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "keepachangelog.com" in text
    versions = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert versions[0] == ("Unreleased", "") and versions[1][0] == splitjax.__version__ and versions[1][1]
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_templates_of_issues_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    for field in form["body"]:
        assert field["type"] == "textarea" and field["id"] and field["attributes"]["label"]


def test_on_a_package_index_the_readme_has_no_link_that_leads_nowhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    (fragment,) = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    left = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert left == [] and "docs/quickstart.md" in text and "# splitjax" in text


def test_the_container_installs_an_extra_that_there_is():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"/opt/splitjax\[([\w,]+)\]", (ROOT / "docker/gpu.Dockerfile").read_text())
    assert set(wanted.split(",")) <= set(extras)

"""The order of the site's pages. It is added to the index while the site is built, so that the file itself stays plain
Markdown."""

from __future__ import annotations

# By part of the site: documents relative to the checkout, without their suffix.
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Start",
        (
            "docs/quickstart",
            "docs/first_day",
            "docs/frameworks",
            "docs/migrating",
            "docs/comparison",
            "docs/choosing",
            "docs/rules",
            "docs/meshes",
            "docs/planning",
            "docs/kernels",
            "docs/reports",
            "docs/time",
            "docs/verify",
            "docs/troubleshooting",
        ),
    ),
    (
        "Training",
        ("docs/training", "docs/mixed_precision", "docs/data", "docs/checkpoints", "docs/launching"),
    ),
    (
        "Methods",
        (
            "docs/splitbrain",
            "docs/sharded_state",
            "docs/sparse",
            "docs/partial_backpropagation",
            "docs/scheduler",
            "docs/semantics",
            "docs/partitioner",
        ),
    ),
    (
        "Reference",
        ("docs/api/index", "sharding_rules/README", "docs/words", "docs/measured", "CHANGELOG", "SECURITY"),
    ),
    ("Development", ("CONTRIBUTING", "docs/architecture")),
)
PAGES = ("docs/index", "docs/measured")


def contents(page: str) -> str:
    """Returns the hidden tables of contents of a `page`, as Markdown that Sphinx's parser reads."""
    if page == "docs/measured":
        return "\n```{toctree}\n:hidden:\n:glob:\n\n/benchmarks/results/*\n```\n"
    trees = [
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(f"/{name}" for name in names) + "\n```\n"
        for caption, names in _PARTS
    ]
    return "".join(trees)

"""Operations that an installed package teaches by an entry point, when a step with them is traced."""

from __future__ import annotations

import pytest

from splitjax import _registry
from splitjax.errors import ExtensionError
from splitjax.primitives.table import OPERATIONS


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """Installs a package whose modules teach an operation of another one, nothing, and fail."""
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    points = "strange_op = strange_teaches\nidle_op = strange_idles\nbroken_op = strange_fails\n"
    (info / "entry_points.txt").write_text(f"[splitjax.primitives]\n{points}")
    teaches = 'import splitjax\nsplitjax.register_primitive("strange_op", dims="b i -> i b")\n'
    for name, text in {"teaches": teaches, "idles": "", "fails": "1 / 0\n"}.items():
        (tmp_path / f"strange_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    OPERATIONS.forget("strange_op")
    _registry._entry_points.cache_clear()


def test_an_operation_is_taught_when_it_is_met(declared):
    assert "strange_op" not in OPERATIONS and OPERATIONS.get("strange_op") is None
    assert OPERATIONS.of("strange_op", {}).dims is not None
    assert "strange_op" in OPERATIONS
    assert OPERATIONS.of("an_op_of_nobody", {}).dims is None


@pytest.mark.parametrize(("name", "words"), [("idle_op", "teaches no primitive"), ("broken_op", "ZeroDivisionError")])
def test_a_package_that_teaches_nothing_is_named(declared, name, words):
    with pytest.raises(ExtensionError, match=words) as caught:
        OPERATIONS.of(name, {})
    assert "package stranger" in caught.value.place

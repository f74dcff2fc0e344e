"""Operations that are wrong on purpose are known to splitjax while these tests run."""

from __future__ import annotations

import pytest

from tests.verify.lying import taught


@pytest.fixture(autouse=True, scope="module")
def _lies():
    with taught():
        yield

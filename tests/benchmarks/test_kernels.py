"""What the benchmark of kernels compares: equal results of ours and XLA's, and honest bytes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import kernels


@pytest.fixture(scope="module")
def cases():
    return {one.name: one for one in kernels.cases(num_rows=3000, width=16)}


@pytest.mark.parametrize("name", ["bitmap decode", "segment sum", "gather", "scatter"])
def test_both_do_the_same(cases, name):
    one = cases[name]
    own, xla = (jax.tree.leaves(jax.jit(function)(*one.operands))[0] for function in (one.own, one.xla))
    np.testing.assert_allclose(own, xla, rtol=1e-4, atol=1e-4)


def test_bytes_are_those_of_the_rows_that_count(cases):
    gather = cases["gather"]
    table, rows = gather.operands
    assert gather.num_bytes == 2 * 64 * int((rows < table.shape[0]).sum())
    assert gather.num_bytes < 2 * 64 * rows.shape[0]


def test_no_page_from_a_cpu(capsys):
    assert kernels.main(["--rows", "100", "--width", "8", "--repeats", "1", "--write"]) == 2
    printed = capsys.readouterr()
    assert "no accelerator here" in printed.out and "accelerator" in printed.err

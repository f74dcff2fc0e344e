"""What no rule changes about the parameters of a step, made once for its graph."""

from __future__ import annotations

import dataclasses

import pytest

from splitjax.rules.match import mapped_dims
from splitjax.rules.parameters import Parameters


@pytest.fixture
def chain(builder):
    builder.layer("up", "dense", kernel="in:16 out:32@h#t", bias="_:32@h#t")
    builder.layer("down", "dense", kernel="in:32@h#t out:16@o")
    builder.moments()
    return builder.graph()


def test_tables_name_the_parameters_of_a_class(chain):
    found = Parameters.of(chain)
    up, bias, down = "params/up/kernel", "params/up/bias", "params/down/kernel"
    assert list(found.leaves) == [up, bias, down]
    assert found.kinds == dict.fromkeys(found.leaves, "dense")
    assert found.homes == {up: "up", bias: "up", down: "down"}
    for labels, members in ((found.hard, found.by_hard), (found.local, found.by_local)):
        assert members[labels[up][1]] == (up, bias, down)
        assert labels[up][1] == labels[bias][0] == labels[down][0]
        assert members[labels[up][0]] == (up,)
    assert found.mapped == {path: mapped_dims(chain, leaf) for path, leaf in found.leaves.items()}


def test_tables_are_made_once_for_a_graph(chain):
    assert Parameters.of(chain) is Parameters.of(chain)
    # A graph that was changed is another one: its tables are its own.
    fewer = dataclasses.replace(chain, layers=chain.layers[:1])
    assert Parameters.of(fewer).homes.keys() == {"params/up/kernel", "params/up/bias"}
    assert "params/down/kernel" in Parameters.of(chain).homes


def test_once_tells_what_is_asked_for(chain):
    asked = []

    def count(graph, role, *, least=0):
        asked.append((role, least))
        return sum(leaf.role == role and leaf.size >= least for leaf in graph.leaves)

    answers = [chain.once(count, "param"), chain.once(count, "optimizer"), chain.once(count, "param", least=512)]
    assert answers == [3, 3, 2]
    assert [chain.once(count, "param"), chain.once(count, "param", least=512)] == [3, 2]
    assert asked == [("param", 0), ("optimizer", 0), ("param", 512)]

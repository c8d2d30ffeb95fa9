"""Every state machine of the policy lists every pair, and only its own file assigns a state."""

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.machines import Machine, to_markdown
from nodeagent.policy import machines
from tests.support.paths import REPOSITORY

MACHINES = machines.machines()
by_name = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))


@by_name
def test_every_state_and_event_is_listed(machine: Machine[Any, Any]) -> None:
    assert machine.missing() == []
    assert len(machine.transitions) == len(machine.states.__members__) * len(machine.events.__members__)


@by_name
def test_every_event_has_a_meaning_and_every_remark_a_pair(machine: Machine[Any, Any]) -> None:
    assert sorted(machine.meanings) == sorted(machine.events.__members__.values())
    assert set(machine.remarks) <= set(machine.transitions)
    assert to_markdown(machine).count("\n| **") == len(machine.states.__members__)


@by_name
def test_the_file_of_a_machine_exists_and_names_its_table(machine: Machine[Any, Any]) -> None:
    tree = ast.parse((REPOSITORY / machine.module).read_text("utf-8"))
    assigned = {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {"TRANSITIONS", "MACHINE"} <= assigned


@given(st.data())
def test_a_walk_stays_in_the_table_until_the_value_is_removed(data: st.DataObject) -> None:
    machine = data.draw(st.sampled_from(list(MACHINES.values())))
    state = next(iter(machine.states))
    for event in data.draw(st.lists(st.sampled_from(list(machine.events)), max_size=30)):
        after = machine.transitions[state, event]
        if after is None:
            break
        assert after in machine.states
        state = after

"""The table of moves: every pair of states is either legal or raises."""

import itertools

import pytest

from vlm_server.engine.request.states import LIVE, IllegalTransition, State, check_transition

ABORTED, FAILED = State.FINISHED_ABORTED, State.FINISHED_FAILED

LEGAL = {
    (State.WAITING, State.PREPARING),
    (State.PREPARING, State.WAITING_FOR_MEMORY),
    (State.PREPARING, State.FINISHED_ANSWERED),
    (State.WAITING_FOR_MEMORY, State.WAITING),
    (State.WAITING_FOR_MEMORY, State.READING_DISK),
    (State.WAITING_FOR_MEMORY, State.ENCODING),
    (State.WAITING_FOR_MEMORY, State.PREFILL),
    (State.READING_DISK, State.WAITING),
    (State.READING_DISK, State.ENCODING),
    (State.READING_DISK, State.PREFILL),
    (State.ENCODING, State.PREFILL),
    (State.PREFILL, State.WAITING),
    (State.PREFILL, State.DECODE),
    (State.PREFILL, State.FINISHED_ANSWERED),
    (State.DECODE, State.FINISHED_ANSWERED),
    *itertools.product(LIVE, (ABORTED, FAILED)),
}


def test_state_changes_outside_table_raise():
    for old, new in itertools.product(State, State):
        if (old, new) in LEGAL:
            check_transition(old, new)
        else:
            with pytest.raises(IllegalTransition, match=f"{old.name} -> {new.name}"):
                check_transition(old, new)


def test_finished_states_have_no_successor():
    finished = {state for state in State if state.is_finished}
    assert finished == {State.FINISHED_ANSWERED, ABORTED, FAILED}

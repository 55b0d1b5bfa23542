"""The table of moves: every pair of states is either legal or raises."""

import itertools

import pytest

from vlm_server.engine.request.states import IllegalTransition, State, check_transition

W, P, F, D = State.WAITING, State.PREPARING, State.PREFILL, State.DECODE
ANSWERED, ABORTED = State.FINISHED_ANSWERED, State.FINISHED_ABORTED
FAILED = State.FINISHED_FAILED

LEGAL = {
    (W, P),
    (P, F),
    (F, D),
    (D, ANSWERED),
    *itertools.product((W, P, F, D), (ABORTED, FAILED)),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_every_pair_is_legal_or_raises(old: State, new: State):
    if (old, new) in LEGAL:
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransition, match=f"{old.name} -> {new.name}"):
            check_transition(old, new)


def test_a_state_is_finished_when_nothing_follows():
    finished = {state for state in State if state.is_finished}
    assert finished == {ANSWERED, ABORTED, FAILED}

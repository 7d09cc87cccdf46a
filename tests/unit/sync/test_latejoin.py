"""Late joiners: who lends to whom, what stops it, and what is done about an attempt that fails."""

import pytest

from fakes.engine import FakeEngine
from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import RefitPolicy, Transport, Wire
from rolloutfleet.contract.trainer import FleetView, Phase
from rolloutfleet.contract.worker import Borrow, Lend, ReceiveReport, WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.latejoin import LONGEST_RETRY_SECONDS
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.view import judge_readiness, view_fleet


def fleet(engines: int = 2, version: int = 1) -> Simulation:
    """A fleet whose engines all serve this version."""
    sim = Simulation(engines=engines, policy=RefitPolicy(transport=Transport.AUTO, deadlines=DEADLINES))
    sim.start()
    sim.settle()
    sim.open_session()
    if version:
        assert sim.run_refit(version, "r0").phase is Phase.COMPLETE
    return sim


def restart(sim: Simulation, engine: int, **fields: object) -> FakeEngine:
    """The engine's container starts anew, with the weights of its start."""
    fresh = sim.workers[engine] = FakeEngine(sim.workers[engine].member, instance=f"i{sim.fresh()}", **fields)
    return fresh


def pass_time(sim: Simulation, seconds: int) -> None:
    for _ in range(seconds):
        sim.advance(1.0)
        sim.settle()
        if sim.state.session is not None:
            sim.apply(events.SessionRenewed(sim.state.session.id))


def until_called(sim: Simulation, verb: Verb) -> CallWorker:
    """The first call of this verb that is under way, held back; everything before it has been delivered."""
    for _ in range(60):
        held = next((call for call in sim.calls if call.verb is verb), None)
        if held is not None:
            return held
        if sim.answers:
            sim.deliver_answer()
        elif sim.calls:
            sim.deliver_call()
        else:
            sim.advance(1.0)
    raise AssertionError(f"{verb} was not called")


def message_of(sim: Simulation, engine: int) -> str:
    view: FleetView = view_fleet(sim.state)
    return view.members[engine].message


def test_lend_and_borrow_carry_the_current_epoch_and_the_transfers_deadline():
    sim = fleet()
    kept = sim.state.epoch
    late = restart(sim, 1)
    pass_time(sim, 8)
    assert late.serves
    assert late.weights == sim.workers[0].weights
    (lend,) = [call for name, call in sim.workers[0].calls if name == "Lend"]
    (borrow,) = [call for name, call in late.calls if name == "Borrow"]
    assert isinstance(lend, Lend)
    assert isinstance(borrow, Borrow)
    assert (lend.epoch, borrow.epoch, sim.state.epoch) == (kept, kept, kept)
    assert (lend.version, borrow.version) == (1, 1)
    assert (lend.wire, borrow.wire) == (Wire.GLOO, Wire.GLOO)
    assert lend.deadline_seconds == borrow.deadline_seconds == DEADLINES.transferring_seconds
    assert sim.run_refit(2).phase is Phase.COMPLETE


def test_nothing_is_borrowed_before_the_first_version():
    sim = fleet(version=0)
    restart(sim, 1)
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()
    assert sim.workers[1].serves


def test_without_a_peer_the_engine_waits_for_the_next_refit():
    sim = fleet(engines=1)
    late = restart(sim, 0)
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()
    assert not late.serves
    assert message_of(sim, 0).startswith("Stale: holds version 0, the fleet has committed version 1")
    assert sim.run_refit(2).phase is Phase.COMPLETE
    assert late.serves


@pytest.mark.parametrize("differs", ["ranks", "device"])
def test_a_peer_of_another_size_or_kind_is_not_asked(differs: str):
    sim = fleet(engines=2)
    late = restart(sim, 1, **({"device": "GPU-1"} if differs == "device" else {}))
    if differs == "ranks":
        late.member = late.member.model_copy(update={"ranks": 2})
        sim.apply(events.RosterChanged(sim.roster))
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()


def test_a_peer_of_another_shape_is_refused_by_the_borrower_and_named():
    sim = fleet()
    late = restart(sim, 1, shape="other")
    pass_time(sim, 8)
    assert not late.serves
    assert late.weights == (0, "")
    assert f"could not borrow version 1 from {sim.workers[0].name}: " in message_of(sim, 1)
    assert "so weights can only come from the trainer" in message_of(sim, 1)
    assert f"{late.name}: Stale" in judge_readiness(sim.state).message
    assert not sim.workers[0].fence.lending, "the donor was told to let go"


def test_a_donor_that_lends_is_not_asked_by_another_late_engine():
    sim = fleet(engines=3)
    restart(sim, 1)
    restart(sim, 2)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    pass_time(sim, 6)
    assert sim.verbs().count("lend") == 1
    assert len([loan for loan in sim.state.loans.values() if loan.donor]) == 1


def test_a_report_from_before_the_end_of_a_loan_does_not_undo_it():
    sim = fleet()
    late = restart(sim, 1)
    late.may_borrow.clear()
    held = until_called(sim, Verb.BORROW)
    sim.deliver_call(sim.calls.index(held))
    uid = late.member.pod_uid
    while not any(call.pod_uid == uid and call.verb is Verb.REPORT for call in sim.calls):
        sim.advance(0.5)
    sim.deliver_call(next(i for i, call in enumerate(sim.calls) if call.pod_uid == uid))
    (stale,) = [e for e in sim.answers if isinstance(e, events.CallAnswered) and e.answer.pod_uid == uid]
    assert stale.answer.state is WorkerState.RECEIVING
    sim.answers.remove(stale)
    late.may_borrow.set()
    sim.advance(0.1)
    (ended,) = [e for e in sim.answers if isinstance(e, events.CallAnswered) and e.call == held.call]
    sim.answers.remove(ended)
    sim.apply(ended)
    sim.apply(stale)
    pass_time(sim, 3)
    assert late.serves
    assert "Abort" not in [name for name, _ in late.calls]


def test_a_dirty_engine_is_healed_by_a_peer():
    sim = fleet(engines=3)
    dirty = sim.workers[2]
    dirty.fence = dirty.fence.cache_not_reset(1, "vLLM answered no")
    pass_time(sim, 10)
    assert dirty.serves
    assert dirty.weights == sim.workers[0].weights


def test_attempts_that_fail_are_made_ever_more_rarely():
    sim = fleet()
    restart(sim, 1, peer_fails=True)
    pass_time(sim, 240)
    lends = sum(name == "Lend" for name, _ in sim.workers[0].calls)
    assert 5 <= lends <= 3 + 240 / LONGEST_RETRY_SECONDS + 4
    sim.workers[1].peer_fails = False
    pass_time(sim, int(LONGEST_RETRY_SECONDS) + 5)
    assert sim.workers[1].serves
    assert message_of(sim, 1) == ""


def test_what_differs_from_what_was_lent_is_never_committed():
    sim = fleet()
    late = restart(sim, 1)
    held = until_called(sim, Verb.BORROW)
    sim.deliver_call(sim.calls.index(held))
    answer = next(e for e in sim.answers if isinstance(e, events.CallAnswered) and e.call == held.call)
    assert isinstance(answer.answer, ReceiveReport)
    sim.answers.remove(answer)
    late.peer_fails = True
    report = answer.answer.model_copy(update={"live_digests": ("something else",)})
    sim.apply(events.CallAnswered(held.call, report))
    assert "it holds version 1 with live digests something else, what was lent is " in message_of(sim, 1)
    sim.cut.add(late.name)
    sim.settle()
    sim.cut.clear()
    pass_time(sim, 4)
    assert late.fence.state is WorkerState.DIRTY
    assert "Commit" not in [name for name, _ in late.calls]


def test_a_borrower_that_falls_silent_frees_its_donor_before_the_deadline():
    sim = fleet()
    late = restart(sim, 1)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    assert sim.workers[0].fence.lending
    assert message_of(sim, 1).endswith(f"takes version 1 over from {sim.workers[0].name}")
    sim.cut.add(late.name)
    started = sim.now
    while sim.workers[0].fence.lending:
        pass_time(sim, 1)
    assert sim.now - started <= sim.timing.unreachable + 8 < DEADLINES.transferring_seconds
    assert sim.workers[0].serves


def test_a_donor_that_leaves_the_fleet_ends_the_loan_and_another_one_lends():
    sim = fleet(engines=3)
    late = restart(sim, 2)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    donor = sim.workers[0]
    assert donor.fence.lending
    sim.workers[0] = sim.new_engine(0)
    sim.apply(events.RosterChanged(sim.roster))
    pass_time(sim, 12)
    assert late.serves
    assert sim.workers[0].serves
    assert late.weights == sim.workers[1].weights == sim.workers[0].weights


def test_a_refit_that_begins_ends_the_loan_first():
    sim = fleet()
    late = restart(sim, 1)
    held = until_called(sim, Verb.BORROW)
    before = len(sim.verbs())
    sim.calls.remove(held)
    sim.request(2)
    assert sim.state.loans == {}
    assert sorted(sim.verbs()[before:]) == ["abort", "abort"]
    assert sim.view().phase is Phase.FORMING
    sim.settle()
    assert not sim.workers[0].fence.lending
    sim.fail()
    sim.settle()
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    assert late.serves


def test_a_successor_of_the_sync_job_lends_again():
    sim = fleet()
    late = restart(sim, 1)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    sim.restart_sync()
    sim.workers[0].ranks.let_go()
    pass_time(sim, 20)
    assert late.serves

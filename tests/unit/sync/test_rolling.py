"""Rolling refits: who is in the first wave, how the others follow, and what they may serve until then."""

import pytest

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, RollingPolicy, Staging, Strategy, Transport
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Admit, Borrow, WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.rolling import is_under_way
from rolloutfleet_sync.protocol.staleness import count_unavailable
from rolloutfleet_sync.protocol.view import view_fleet

STALE_SECONDS = 60


def fleet(
    engines: int = 4,
    *,
    at_a_time: int = 1,
    staging: Staging = Staging.AUTO,
    pause: PauseMode = PauseMode.KEEP,
    stale_seconds: int = STALE_SECONDS,
) -> Simulation:
    """A fleet whose engines all serve version 0."""
    policy = RefitPolicy(
        transport=Transport.AUTO,
        deadlines=DEADLINES,
        staging=staging,
        pause=pause,
        strategy=Strategy.ROLLING,
        rolling=RollingPolicy(max_unavailable=at_a_time, max_stale_seconds=stale_seconds),
    )
    sim = Simulation(engines=engines, policy=policy)
    sim.start()
    sim.settle()
    sim.open_session()
    return sim


def versions(sim: Simulation) -> list[int | None]:
    """By engine, the version that it serves; None where it refuses."""
    return [sim.workers[n].fence.version if sim.workers[n].serves else None for n in sorted(sim.workers)]


def members(sim: Simulation) -> list[int]:
    """Engines of the last group."""
    assert sim.state.refit is not None
    return [seat.engine for seat in sim.state.refit.seats]


def roll(sim: Simulation, version: int, seconds: int = 40) -> None:
    """Let time pass until every engine serves the version; the trainer keeps its session."""
    for _ in range(seconds):
        sim.settle()
        if versions(sim) == [version] * sim.engines:
            return
        sim.advance(1.0)
        if sim.state.session is not None:
            sim.apply(events.SessionRenewed(sim.state.session.id))
    raise AssertionError(f"the roll did not end: {versions(sim)}, {sim.state.loans}")


def test_the_group_is_the_first_wave_and_the_others_serve_the_version_before():
    sim = fleet(at_a_time=2)
    assert sim.run_refit(1).phase is Phase.COMPLETE
    assert members(sim) == [0, 1]
    assert versions(sim) == [1, 1, 0, 0]
    assert sim.workers[2].weights == (0, "")


def test_every_engine_takes_the_version_over_from_a_peer_and_becomes_a_lender():
    sim = fleet(engines=8)
    sim.run_refit(1)
    roll(sim, 1)
    assert {worker.weights for worker in sim.workers.values()} == {sim.workers[0].weights}
    lenders = {name for name, worker in sim.workers.items() if any(verb == "Lend" for verb, _ in worker.calls)}
    assert len(lenders) > 2, "engines that have borrowed lend on"
    assert all(not any(verb == "Receive" for verb, _ in sim.workers[n].calls) for n in range(1, 8))


def test_the_kept_group_takes_the_next_version_too():
    sim = fleet()
    sim.run_refit(1, "r1")
    roll(sim, 1)
    before = sim.verbs().count("join")
    sim.run_refit(2, "r2")
    assert (members(sim), sim.verbs().count("join") - before) == ([0], 0)


def test_with_room_an_engine_serves_while_it_takes_the_version_over():
    sim = fleet(engines=6)
    sim.run_refit(1)
    out = 0
    while versions(sim) != [1] * 6:
        if not sim.step():
            sim.advance(1.0)
        out = max(out, versions(sim).count(None))
    assert out == 0
    borrowed = [call for worker in sim.workers.values() for verb, call in worker.calls if verb == "Borrow"]
    assert len(borrowed) == 5
    assert all(isinstance(call, Borrow) and call.staged for call in borrowed)


@pytest.mark.parametrize("at_a_time", [1, 2])
@pytest.mark.parametrize("way", ["never staged", "no room"])
def test_without_room_no_more_engines_than_allowed_are_out_of_service(at_a_time: int, way: str):
    sim = fleet(engines=5, at_a_time=at_a_time, staging=Staging.NEVER if way == "never staged" else Staging.AUTO)
    for worker in sim.workers.values():
        worker.room_bytes = 0
    sim.run_refit(1)
    out = 0
    while versions(sim) != [1] * 5:
        if not sim.step():
            sim.advance(1.0)
        out = max(out, sum(worker.fence.state is not WorkerState.SERVING for worker in sim.workers.values()))
    assert out == at_a_time
    assert all(not loan.problem for loan in sim.state.loans.values()), "a lack of room is no failure"


def test_an_engine_that_is_gone_counts_until_half_of_the_time_has_passed():
    sim = fleet(engines=3, staging=Staging.NEVER)
    sim.cut.add(sim.workers[2].name)
    sim.advance(5.0)
    sim.settle()
    sim.run_refit(1)
    for _ in range(STALE_SECONDS // 2 - 2):
        sim.advance(1.0)
        sim.settle()
        sim.apply(events.SessionRenewed("s1"))
    assert versions(sim)[:2] == [1, 0]
    for _ in range(10):
        sim.advance(1.0)
        sim.settle()
    assert versions(sim)[:2] == [1, 1]


def test_a_stale_engine_is_fenced_in_time_by_itself_when_the_sync_job_is_gone():
    sim = fleet(engines=2)
    for worker in sim.workers.values():
        worker.peer_fails = True
    sim.run_refit(1)
    sim.settle()
    (told,) = [call for verb, call in sim.workers[1].calls if verb == "Admit" and call.version == 1]
    assert isinstance(told, Admit)
    assert told.stale_seconds == pytest.approx(STALE_SECONDS)
    sim.now += STALE_SECONDS - 1
    sim._run_engines()
    assert versions(sim) == [1, 0]
    sim.now += 1.5
    sim._run_engines()
    assert versions(sim) == [1, None]
    assert "maxStaleSeconds" in sim.workers[1].fence.unready_reason()


def test_the_end_is_known_before_the_commit_and_taken_back_when_the_refit_fails():
    sim = fleet(engines=2)
    sim.request(1)
    sim.settle()
    sim.join()
    sim.settle()
    sim.prepare()
    sim.settle()
    assert sim.workers[1].report().stale_seconds is not None, "told before anything is received"
    assert sim.workers[1].serves
    assert sim.view().send is not None
    sim.fail()
    for _ in range(8):
        sim.settle()
        sim.advance(1.0)
    assert sim.workers[1].report().stale_seconds is None
    assert versions(sim)[1] == 0


def test_a_time_that_is_running_is_never_made_longer():
    sim = fleet(engines=3)
    sim.workers[2].peer_fails = True
    sim.run_refit(1, "r1")
    for _ in range(20):
        sim.advance(1.0)
        sim.settle()
        sim.apply(events.SessionRenewed("s1"))
    left = sim.workers[2].report().stale_seconds
    assert left is not None
    assert left <= STALE_SECONDS - 20
    sim.run_refit(2, "r2")
    sim.settle()
    again = sim.workers[2].report().stale_seconds
    assert again is not None
    assert again <= left


def test_a_refit_waits_for_the_roll_of_the_one_before():
    sim = fleet(engines=3)
    sim.run_refit(1, "r1")
    sim.request(2, "r2")
    assert is_under_way(sim.state, sim.now)
    assert sim.view("r2").phase is Phase.PENDING
    seen = set()
    while sim.view("r2").phase is Phase.PENDING:
        if not sim.step():
            sim.advance(1.0)
        seen |= set(versions(sim))
    assert seen == {0, 1}
    assert versions(sim) == [1, 1, 1]


def test_an_engine_that_cannot_borrow_holds_no_refit_up_and_gets_no_extra_time():
    sim = fleet(engines=3)
    sim.workers[2].shape = "other"
    sim.run_refit(1, "r1")
    for _ in range(6):
        sim.advance(1.0)
        sim.settle()
    assert versions(sim) == [1, 1, 0]
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    for _ in range(STALE_SECONDS):
        sim.advance(1.0)
        sim.settle()
        sim.apply(events.SessionRenewed("s1"))
    assert versions(sim) == [2, 2, None]


def test_engines_that_are_out_of_service_are_the_wave_when_no_other_may_be():
    sim = fleet(engines=3)
    sim.run_refit(1, "r1")
    roll(sim, 1)
    sim.restart(2, shape="other")
    for _ in range(3):
        sim.advance(1.0)
        sim.settle()
    assert versions(sim) == [1, 1, None]
    sim.run_refit(2, "r2")
    assert members(sim) == [2]
    roll_of_the_others = versions(sim)
    assert roll_of_the_others == [1, 1, 2]


def test_without_an_engine_that_may_be_taken_the_refit_waits_for_a_while_and_then_takes_one():
    sim = fleet(engines=3)
    sim.run_refit(1, "r1")
    roll(sim, 1)
    sim.cut.add(sim.workers[2].name)
    for _ in range(12):
        sim.advance(1.0)
        sim.settle()
        sim.apply(events.SessionRenewed("s1"))
    began = sim.now
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    assert DEADLINES.absent_seconds <= sim.now - began <= DEADLINES.absent_seconds + 2
    assert members(sim) == [0]


def test_a_wave_that_is_lost_is_replaced_by_engines_outside_it():
    sim = fleet(engines=3, at_a_time=2)
    sim.run_refit(1, "r1")
    roll(sim, 1)
    sim.request(2, "r2")
    while not sim.transfers:
        if not sim.step():
            sim.obey("r2")
    for engine in (0, 1):
        sim.cut.add(sim.workers[engine].name)
        sim.workers[engine].break_transfer("connection closed by peer")
    for _ in range(60):
        if sim.view("r2").phase in {Phase.COMPLETE, Phase.FAILED}:
            break
        sim.settle()
        if not sim.obey("r2"):
            sim.advance(1.0)
            sim.apply(events.SessionRenewed("s1"))
    assert sim.view("r2").phase is Phase.COMPLETE, sim.view("r2").problem
    assert members(sim) == [2]


def test_a_replacement_that_comes_during_a_roll_gets_the_version_like_the_others():
    sim = fleet(engines=4)
    sim.run_refit(1)
    sim.workers[3] = sim.new_engine(3)
    sim.apply(events.RosterChanged(sim.roster))
    seen = set()
    while versions(sim) != [1] * 4:
        if not sim.step():
            sim.advance(1.0)
        seen.add(versions(sim)[3])
    assert seen == {None, 1}, "it never serves what it loaded at its start"


def test_another_lender_takes_over_when_one_is_lost():
    sim = fleet(engines=4, at_a_time=2)
    sim.run_refit(1)
    for _ in range(200):
        loan = next((uid for uid, loan in sim.state.loans.items() if loan.lent), None)
        if loan is not None:
            break
        if not sim.step():
            sim.advance(1.0)
    assert loan is not None
    donor = sim.find(sim.state.loans[loan].donor)
    assert donor is not None
    sim.restart(donor.member.engine)
    began = sim.now
    taker = sim.find(loan)
    assert taker is not None
    while not (taker.serves and taker.fence.version == 1):
        if not sim.step():
            sim.advance(0.5)
    assert sim.now - began < 2 * sim.timing.heartbeat, "the first failure is not waited for"
    roll(sim, 1)


def test_a_new_sync_job_goes_on_with_a_roll_from_what_engines_say():
    sim = fleet(engines=5)
    sim.run_refit(1)
    sim.settle()
    left = [sim.workers[n].report().stale_seconds for n in range(5)]
    while versions(sim).count(1) < 3:
        if not sim.step():
            sim.advance(1.0)
    sim.restart_sync()
    sim.settle()
    for before, number in zip(left, range(5), strict=True):
        now = sim.workers[number].report().stale_seconds
        assert now is None or before is None or now <= before
    roll(sim, 1)
    assert None not in versions(sim)


def test_an_adapter_goes_to_all_engines_at_once():
    sim = fleet(engines=3)
    sim.run_refit(1, "r1")
    roll(sim, 1)
    adapter = AdapterSpec(name="style", rank=8, alpha=16, target_modules=("q_proj",))
    assert sim.run_refit(2, "r2", adapter=adapter).phase is Phase.COMPLETE
    assert (members(sim), versions(sim)) == ([0, 1, 2], [2, 2, 2])


def test_a_trainer_that_fixes_the_world_size_reaches_all_engines_at_once():
    sim = fleet(engines=3)
    sim.apply(events.SessionClosed("s1"))
    sim.open_session("s2", world_size=4)
    assert sim.run_refit(1, session="s2").phase is Phase.COMPLETE
    assert members(sim) == [0, 1, 2]


def test_requests_in_flight_are_waited_for_where_the_fleet_says_so():
    sim = fleet(engines=3, pause=PauseMode.WAIT, staging=Staging.NEVER)
    sim.run_refit(1)
    roll(sim, 1)
    borrows = [call for worker in sim.workers.values() for verb, call in worker.calls if verb == "Borrow"]
    assert [(call.pause, call.staged) for call in borrows] == [(PauseMode.WAIT, False)] * 2


def test_a_staged_version_that_needs_a_pause_is_swapped_in_within_the_bound():
    sim = fleet(engines=5, pause=PauseMode.WAIT)
    sim.run_refit(1)
    out = 0
    while versions(sim) != [1] * 5:
        if not sim.step():
            sim.advance(1.0)
        out = max(out, sum(worker.fence.state is not WorkerState.SERVING for worker in sim.workers.values()))
    assert out == 1


def test_trainers_see_stale_engines_as_ready_and_why_they_lag():
    sim = fleet(engines=2)
    sim.workers[1].peer_fails = True
    sim.run_refit(1)
    sim.settle()
    view = view_fleet(sim.state)
    assert [(member.ready, member.version) for member in view.members] == [(True, 1), (True, 0)]
    assert len(view.endpoints) == 2
    assert "serves version 0 until it has taken version 1 over" in view.members[1].message
    assert count_unavailable(sim.state) == 0

"""What holds of a roll whatever the order in which calls and answers arrive, and whoever fails meanwhile."""

from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, RollingPolicy, Staging, Strategy, Transport
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.events import RosterChanged, SessionRenewed
from rolloutfleet_sync.protocol.rolling import is_under_way

STALE_SECONDS = 40


class Roll:
    """A fleet under a roll, with what must hold checked after everything that happens."""

    def __init__(self, engines: int, at_a_time: int, staging: Staging, pause: PauseMode):
        policy = RefitPolicy(
            transport=Transport.AUTO,
            deadlines=DEADLINES,
            staging=staging,
            pause=pause,
            strategy=Strategy.ROLLING,
            rolling=RollingPolicy(max_unavailable=at_a_time, max_stale_seconds=STALE_SECONDS),
        )
        self.at_a_time = at_a_time
        self.sim = Simulation(engines=engines, policy=policy)
        self.sim.start()
        self.sim.settle()
        self.sim.open_session()
        self.superseded: dict[int, float] = {}
        self.newest = 0
        self.faulty: set[int] = set()
        """Engines that are out of service for another reason than the roll, as far as is known here."""
        self.faults = self.sync_restarted = False
        """Whether an engine may stay out of service for long, so that one more is taken when half of the time is over."""
        self.unreached: set[int] = set()
        """Engines that could not be told of the newest version yet: nothing but a word from the sync job can end what they serve."""

    def refit(self, version: int) -> None:
        self.sim.request(version, f"r{version}")

    def act(self, pick: int, *, hurry: bool = False) -> None:
        """Let one of the things happen that can."""
        sim = self.sim
        refit = next((r for r in (sim.state.active, sim.state.queued) if r is not None), None)
        if refit is not None and sim.obey(refit.id):
            return self.check()
        if sim.reads:
            sim.read_status()
        elif sim.writes:
            sim.end_write()
        elif sim.can_end_transfer():
            sim.end_transfer(pick % len(sim.transfers))
        elif sim.answers and (pick % 3 or not sim.calls):
            sim.deliver_answer(pick % len(sim.answers))
        elif sim.calls:
            sim.deliver_call(pick % len(sim.calls))
        else:
            sim.advance(1.0 if hurry else 0.2 + pick % 4)
            if sim.state.session is not None:
                sim.apply(SessionRenewed(sim.state.session.id))
        return self.check()

    def check(self) -> None:
        sim = self.sim
        for version in sorted(sim.published):
            if version > self.newest:
                self.superseded.setdefault(self.newest, sim.now)
                self.newest = version
        out = 0
        for number, engine in sim.workers.items():
            if engine.name in sim.cut:
                self.unreached.add(number)
            elif engine.fence.admitted == self.newest:
                self.unreached.discard(number)
            if engine.serves:
                self.faulty.discard(number)
                assert engine.weights is not None, f"{engine.name} serves a mixture"
                assert sim.published[engine.fence.version] == engine.weights[1], (
                    f"{engine.name} serves what nobody published"
                )
                assert engine.fence.version == engine.weights[0]
                ends = self.superseded.get(engine.fence.version, float("inf")) + STALE_SECONDS
                assert number in self.unreached or sim.now <= ends, (
                    f"{engine.name} serves version {engine.fence.version} at {sim.now}, the end was {ends}"
                )
            elif engine.fence.state is not WorkerState.SERVING and number not in self.faulty:
                out += 1
        # A sync job that has just started errs on the side of less time.
        late = self.sync_restarted or any(sim.now >= at + STALE_SECONDS / 2 for at in self.superseded.values())
        assert out <= self.at_a_time + (late and self.faults), {n: str(e.fence.state) for n, e in sim.workers.items()}

    def restart(self, number: int) -> None:
        old = self.sim.workers[number]
        self.faulty.add(number)
        self.sim.restart(number, room_bytes=old.room_bytes)

    def replace(self, number: int) -> None:
        self.faulty.add(number)
        self.sim.workers[number] = self.sim.new_engine(number)
        self.sim.apply(RosterChanged(self.sim.roster))

    def finish(self) -> None:
        """When the trouble is over every engine comes to the newest version, with no further refit."""
        for _ in range(6000):
            if all(engine.serves and engine.fence.version == self.newest for engine in self.sim.workers.values()):
                return
            self.act(0, hurry=True)
        raise AssertionError({n: (e.serves, str(e.fence)) for n, e in self.sim.workers.items()})


fleets = st.builds(
    Roll,
    engines=st.integers(2, 6),
    at_a_time=st.integers(1, 3),
    staging=st.sampled_from(Staging),
    pause=st.sampled_from([PauseMode.KEEP, PauseMode.WAIT]),
)
seeds = st.integers(0, 2**32 - 1)
ACTS = 160


def picks(seed: int) -> list[int]:
    drawn = Random(seed)
    return [drawn.randrange(12) for _ in range(ACTS)]


@settings(max_examples=120, deadline=None)
@given(roll=fleets, seed=seeds, room=st.booleans(), second=st.integers(30, ACTS))
def test_in_any_order_no_more_engines_than_allowed_are_out_and_every_roll_ends(
    roll: Roll, seed: int, room: bool, second: int
):
    if not room:
        for engine in roll.sim.workers.values():
            engine.room_bytes = 0
    roll.refit(1)
    for number, pick in enumerate(picks(seed)):
        refit = roll.sim.state.active or roll.sim.state.queued
        if number >= second and refit is None and roll.newest == 1:
            roll.refit(roll.newest + 1)
            if is_under_way(roll.sim.state, roll.sim.now):
                event("a second version comes while the first one rolls")
            second = ACTS
        roll.act(pick)
        serving = {engine.fence.version for engine in roll.sim.workers.values() if engine.serves}
        assert len(serving) <= 2, "no more than two versions serve"
    for _ in range(3000):
        if roll.sim.state.active is None and roll.sim.state.queued is None:
            break
        roll.act(0, hurry=True)
    assert roll.sim.state.finished[-1].phase is Phase.COMPLETE
    roll.finish()


fault = st.tuples(st.sampled_from(["restart", "replace", "peer", "cut", "sync"]), st.integers(0, 5))


@settings(max_examples=120, deadline=None)
@given(roll=fleets, seed=seeds, faults=st.dictionaries(st.integers(0, ACTS - 1), fault, min_size=1, max_size=5))
def test_whoever_fails_the_bounds_hold_and_the_roll_ends(roll: Roll, seed: int, faults: dict[int, tuple[str, int]]):
    sim, roll.faults = roll.sim, True
    roll.refit(1)
    for number, pick in enumerate(picks(seed)):
        kind, index = faults.get(number, ("", 0))
        engine = index % sim.engines
        match kind:
            case "restart":
                roll.restart(engine)
            case "replace":
                roll.replace(engine)
            case "peer":
                sim.workers[engine].peer_fails = True
            case "cut":
                sim.cut ^= {sim.workers[engine].name}
            case "sync":
                sim.restart_sync()
                roll.sync_restarted = True
                sim.open_session(f"s{sim.fresh()}", take_over=True) if sim.state.roster and sim.state.record else None
        if kind:
            event(kind)
            for transfer in list(sim.transfers):
                if sim.find(transfer[0].pod_uid) is not transfer[1]:
                    sim.transfers.remove(transfer)
        roll.act(pick)
    sim.cut.clear()
    for worker in sim.workers.values():
        worker.peer_fails = False
    for _ in range(3000):
        if sim.state.active is None and sim.state.queued is None:
            break
        roll.act(0, hurry=True)
    if roll.newest == 0:
        return
    if any(engine.serves and engine.fence.version == roll.newest for engine in sim.workers.values()):
        roll.finish()

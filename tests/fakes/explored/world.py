"""Everything that there is at one moment: the sync job's state, its store, the engines, the trainer, and what is between them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fakes.explored.engine import Engine
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.policy import CachePolicy, RefitDeadlines, RefitPolicy, Transport
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import (
    CallWorker,
    Command,
    WriteRecord,
)
from rolloutfleet_sync.protocol.model import Refit, State, Timing
from rolloutfleet_sync.protocol.record import Record

GRID = 10.0
"""Every interval is a multiple of this, so that clocks meet again."""
TIMING = Timing(
    lease=40.0, poll=GRID, heartbeat=GRID, call=GRID, unreachable=GRID, aborting=GRID, retry=GRID, borrowing_retry=GRID
)
DEADLINES = RefitDeadlines(
    forming_seconds=20,
    absent_seconds=10,
    preparing_seconds=20,
    pausing_seconds=20,
    transferring_seconds=20,
    verifying_seconds=20,
    committing_seconds=20,
    resuming_seconds=20,
)
MANIFEST = Manifest(
    tensors=(TensorSpec(name="a", dtype="float32", shape=(4, 2)), TensorSpec(name="b", dtype="bfloat16", shape=(3,)))
)
IN_PLACE = RefitPolicy(transport=Transport.GLOO, cache=CachePolicy.RESET, deadlines=DEADLINES)
STAGED = RefitPolicy(transport=Transport.LAYOUT, cache=CachePolicy.RESET, deadlines=DEADLINES)

Answer = events.CallAnswered | events.CallFailed
Step = Callable[[State, events.Event, float], tuple[State, tuple[Command, ...]]]


@dataclass(frozen=True, slots=True)
class Request:
    """A call on its way to whoever is at its address."""

    command: CallWorker
    expires: float
    held: bool = False
    """The network keeps it back; it arrives at any later moment, or never."""
    orphan: bool = False
    """Nobody waits for its answer any more."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer on its way to the sync job."""

    event: Answer
    pod_uid: str
    expires: float
    held: bool = False


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer and what it is at."""

    session: str
    refit: str = ""
    version: int = 0
    alive: bool = True
    stalled: bool = False
    """It goes on, but not now."""
    joining: int = 0
    """The epoch whose group it waits to be in."""
    sending: int = 0
    """The epoch in which it sends."""
    done: frozenset[tuple[str, int]] = frozenset()
    """What it has begun, by step and epoch."""
    words: tuple[events.Event, ...] = ()
    """What it has said and the sync job has not heard."""


@dataclass(frozen=True, slots=True)
class Group:
    """Who met in an epoch, and how the transfer in it stands."""

    epoch: int
    members: tuple[str, ...]
    """Pod uids, in the order of their ranks."""
    gone: frozenset[str] = frozenset()
    """Pod uids that have left it."""
    flowing: bool = False
    """Everybody has begun: what was sent arrives."""
    broken: bool = False
    """A party left before its part was done."""
    ended: frozenset[str] = frozenset()
    """Pod uids whose part is done."""


@dataclass(frozen=True, slots=True)
class LateWrite:
    """A write of a sync job that is gone: it lands only while nobody else has written."""

    record: Record
    revision: int
    published: tuple[int, str] | None
    """What it publishes, where it is a commit."""


@dataclass(frozen=True, slots=True)
class World:
    """One moment. Nothing in it changes; what happens makes the next one."""

    state: State
    now: float
    engines: tuple[Engine, ...]
    policy: RefitPolicy
    requests: tuple[Request, ...] = ()
    replies: tuple[Reply, ...] = ()
    writes: tuple[WriteRecord, ...] = ()
    late_writes: tuple[LateWrite, ...] = ()
    reads: int = 0
    unpublished: bool = False
    stored: Record = field(default_factory=Record)
    revision: int = 0
    """Rises with every change of the store."""
    known_revision: int = 0
    """What the sync job read or wrote last."""
    published: frozenset[tuple[int, str]] = frozenset({(0, "")})
    """Version and digest of every version that was committed in the store."""
    trainer: Trainer | None = None
    groups: tuple[Group, ...] = ()
    roster: Roster | None = None
    """What the operator has published last."""
    roster_told: bool = True
    names: int = 0
    """Counts pods, containers, sessions and refits."""
    refits_left: int = 0
    """How many more the trainer asks for."""
    faults: int = 0
    """How many more things go wrong."""
    restarts: int = 0
    """How often the sync job was started."""
    doubts: tuple[str, ...] = ()
    """Promises that were broken inside a single step."""

    @property
    def active(self) -> Refit | None:
        return self.state.active

    def engine(self, pod_uid: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.uid == pod_uid), None)

    def at(self, address: str) -> Engine | None:
        """Who answers at an address."""
        return next((each for each in self.engines if each.member.address == address and each.alive), None)

    def group(self, epoch: int) -> Group | None:
        return next((group for group in self.groups if group.epoch == epoch), None)


def digest_of(version: int, refit: str) -> str:
    return f"{version} by {refit}"


def new_member(engine: int, number: int, address: str = "") -> Member:
    name = f"f-{engine}-0-{number}"
    return Member(engine=engine, pod_name=name, pod_uid=f"uid-{number}", address=address or f"10.0.0.{number}", ranks=1)


def make_roster(engines: tuple[Engine, ...]) -> Roster:
    members = tuple(engine.member for engine in engines)
    return Roster(fleet="f", fleet_uid="fleet-uid", engines=len(members), members=members)

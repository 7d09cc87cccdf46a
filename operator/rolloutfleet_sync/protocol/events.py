"""What can happen to the sync job."""

from dataclasses import dataclass

from pydantic import BaseModel

from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.problems import Problem
from rolloutfleet.contract.trainer import (
    OpenSession,
    RequestRefit,
    SleepFleet,
    TrainerFailed,
    TrainerJoined,
    TrainerPrepared,
    TrainerSent,
    WakeFleet,
)
from rolloutfleet_sync.protocol.record import Record


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StatusRead:
    """The durable record, as it stands."""

    record: Record


@dataclass(frozen=True, slots=True)
class StatusUnreadable:
    """The durable record could not be read."""

    message: str


@dataclass(frozen=True, slots=True)
class RecordWritten:
    """The durable write of this id has succeeded."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The durable write of this id failed, or nobody knows whether it did."""

    write: int
    message: str


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """The operator has published another roster."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """A worker has answered."""

    call: int
    answer: BaseModel


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A worker has refused, or did not answer."""

    call: int
    problem: Problem
    refused: bool
    """True when the worker itself said no; False when no answer came."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A trainer wants the fleet."""

    session: str
    request: OpenSession


@dataclass(frozen=True, slots=True)
class SessionRenewed:
    """A call of the session has come in."""

    session: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The trainer leaves."""

    session: str


@dataclass(frozen=True, slots=True)
class RefitRequested:
    """The trainer has a new version."""

    refit: str
    session: str
    request: RequestRefit
    digest: str
    """The manifest's key, see :func:`rolloutfleet.contract.adapter.manifest_key`."""


@dataclass(frozen=True, slots=True)
class TrainerHasJoined:
    """The trainer is in the group."""

    refit: str
    message: TrainerJoined


@dataclass(frozen=True, slots=True)
class TrainerHasPrepared:
    """Every trainer rank is ready to send."""

    refit: str
    message: TrainerPrepared


@dataclass(frozen=True, slots=True)
class TrainerHasSent:
    """The trainer has sent every tensor."""

    refit: str
    message: TrainerSent


@dataclass(frozen=True, slots=True)
class TrainerHasFailed:
    """The trainer cannot go on."""

    refit: str
    message: TrainerFailed


@dataclass(frozen=True, slots=True)
class CacheResetRequested:
    """A trainer wants every prefix cache dropped."""

    id: str


@dataclass(frozen=True, slots=True)
class SleepRequested:
    """A trainer wants every engine asleep."""

    id: str
    message: SleepFleet


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """A trainer wants every engine awake."""

    id: str
    message: WakeFleet


@dataclass(frozen=True, slots=True)
class HoldReleased:
    """Engines that are held since a refit failed may serve."""


@dataclass(frozen=True, slots=True)
class RoundShown:
    """The outcome of a cache reset, a sleep or a wake has been handed over and may be forgotten."""

    id: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process is about to end."""


Event = (
    Tick
    | StatusRead
    | StatusUnreadable
    | RecordWritten
    | WriteFailed
    | RosterChanged
    | CallAnswered
    | CallFailed
    | SessionOpened
    | SessionRenewed
    | SessionClosed
    | RefitRequested
    | TrainerHasJoined
    | TrainerHasPrepared
    | TrainerHasSent
    | TrainerHasFailed
    | CacheResetRequested
    | SleepRequested
    | WakeRequested
    | HoldReleased
    | RoundShown
    | StopRequested
)

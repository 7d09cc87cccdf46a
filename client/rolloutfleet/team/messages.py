"""What the processes of a team tell each other: JSON, and nothing that would be executed."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rolloutfleet import errors
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.problems import Problem
from rolloutfleet.contract.trainer import FleetView, RefitResult
from rolloutfleet.contract.worker import Locality, Rendezvous
from rolloutfleet.errors import RefitFailed, RolloutFleetError
from rolloutfleet.rank import Order, is_cut_off, lost_ranks


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _OfRound(_Message):
    round: int
    """Counts the calls of ``refit`` on every rank alike; what is left over from an earlier one is dropped."""


class Hello(_Message):
    """A rank presents itself to rank 0."""

    kind: Literal["hello"] = "hello"
    rank: int
    secret: str


class Welcome(_Message):
    """Rank 0 knows the rank."""

    kind: Literal["welcome"] = "welcome"
    ranks: int


class Here(_Message):
    """The rank knows fleet and token."""

    kind: Literal["here"] = "here"


class Connected(_Message):
    """The fleet answered rank 0."""

    kind: Literal["connected"] = "connected"
    view: FleetView


class Ready(_OfRound):
    """The rank has begun ``refit`` and has looked at its tensors."""

    kind: Literal["ready"] = "ready"
    version: int
    adapter: AdapterSpec | None = None
    digest: str
    manifest: Manifest | None = None
    """Given when it is not the one that this rank gave last."""
    device: str
    """GPU UUID on which the rank's tensors lie, or ``cpu``."""
    locality: Locality


class Begin(_OfRound):
    """Every rank is ready: this is what the team sends, and this is the session."""

    kind: Literal["begin"] = "begin"
    session: str
    rendezvous: Rendezvous
    digest: str
    manifest: Manifest | None = None
    """Given when it is not the rank's own."""


class Do(_OfRound):
    """Do this now, as all ranks do."""

    kind: Literal["do"] = "do"
    order: Order


class Loaded(_OfRound):
    """The rank counts its tensors by the team's manifest, and has told the workers what it holds."""

    kind: Literal["loaded"] = "loaded"
    moved: bool
    """Whether it has told them something else of the same manifest in this session."""


class Done(_OfRound):
    """The order is done on this rank."""

    kind: Literal["done"] = "done"
    step: str
    epoch: int


class Stop(_OfRound):
    """Leave the group: its epoch has ended."""

    kind: Literal["stop"] = "stop"
    reason: str


class Ended(_OfRound):
    """Every engine serves the version."""

    kind: Literal["ended"] = "ended"
    result: RefitResult


class Failure(_OfRound):
    """An exception, so that another process can raise it too."""

    kind: Literal["failure"] = "failure"
    epoch: int = 0
    """Of the order that failed; 0 for what is not of one attempt, and ends the refit."""
    peer_lost: bool = False
    """The rank is sound itself, and was cut off by another party of its group."""
    lost_ranks: tuple[int, ...] = ()
    name: str
    message: str
    problem: Problem | None = None
    committed: bool = False


Message = Hello | Welcome | Here | Connected | Ready | Begin | Loaded | Do | Done | Stop | Ended | Failure

_MESSAGES: Final[TypeAdapter[Message]] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])

_PLAIN: Final = {
    kind.__name__: kind for kind in (ConnectionAbortedError, ConnectionError, TimeoutError, TypeError, ValueError)
}


def encode(message: Message) -> bytes:
    """The message as JSON."""
    return message.model_dump_json().encode()


def decode(data: bytes) -> Message:
    """The message; pydantic's ValidationError, a ValueError, for anything else."""
    return _MESSAGES.validate_json(data)


def describe(error: BaseException, turn: int, epoch: int = 0) -> Failure:
    """An exception for other ranks, and the epoch of the order that failed with it."""
    return Failure(
        round=turn,
        epoch=epoch,
        peer_lost=epoch > 0 and is_cut_off(error),
        lost_ranks=lost_ranks(error) if epoch else (),
        name=type(error).__name__,
        message=str(error),
        problem=error.problem if isinstance(error, RolloutFleetError) else None,
        committed=isinstance(error, RefitFailed) and error.committed,
    )


def revive(failure: Failure, origin: str = "") -> Exception:
    """The exception that another rank described, of its own kind where that is the client's or a plain one, else RefitFailed."""
    message = f"{origin}: {failure.message}" if origin else failure.message
    kind: Any = getattr(errors, failure.name, None)
    if isinstance(kind, type) and issubclass(kind, RolloutFleetError):
        # The text ends with the kind's hint already.
        error = kind.__new__(kind)
        Exception.__init__(error, message)
        error.problem = failure.problem
        if isinstance(error, RefitFailed):
            error.committed = failure.committed
        return error
    if failure.name in _PLAIN:
        return _PLAIN[failure.name](message)
    where = f"{origin}: " if origin else ""
    return RefitFailed(f"{where}{failure.name}: {failure.message}")

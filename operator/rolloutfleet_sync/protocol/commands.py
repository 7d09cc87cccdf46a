"""What the state machine wants done."""

from dataclasses import dataclass

from rolloutfleet.contract.worker import Call
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.record import Record


@dataclass(frozen=True, slots=True)
class CallWorker:
    """Call one launcher; answer with CallAnswered or CallFailed of the same id."""

    call: int
    pod_name: str
    pod_uid: str
    address: str
    verb: Verb
    message: Call | None
    seconds: float
    """After this long without an answer the call has failed."""


@dataclass(frozen=True, slots=True)
class CancelCalls:
    """Nobody waits for these calls any more."""

    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """Read the durable record; answer with StatusRead or StatusUnreadable."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write the durable record now; answer with RecordWritten or WriteFailed of the same id."""

    write: int
    record: Record
    seconds: float


@dataclass(frozen=True, slots=True)
class WriteIntent(WriteRecord):
    """The write before the first engine pauses."""


@dataclass(frozen=True, slots=True)
class WriteCommit(WriteRecord):
    """The write that publishes a version."""


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """The status has changed; write it when it suits, not while engines are paused."""


Command = CallWorker | CancelCalls | ReadStatus | WriteIntent | WriteCommit | PublishStatus

"""What is told of refits that have ended and of the one under way: the rows that status, the command line and metrics share."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Told(BaseModel):
    """Parsed leniently: a history may have been written by another release."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Standing(StrEnum):
    """What an engine is where the state that it tells of itself does not say all."""

    STALE = "Stale"
    """Serves an older version than the fleet's, by leave and for a while (refit.strategy Rolling)."""
    OVERDUE = "Overdue"
    """Holds an older version whole, and refuses requests since the time for which it might serve that one is over."""
    LATE = "Late"
    """Is whole and refuses requests until it has the committed version and has been told so: it came up, or was left behind."""
    SILENT = "Silent"
    """Does not answer the sync job."""
    ABSENT = "Absent"
    """Has no pod."""


class Gap(_Told):
    """One reason why a group is not whole yet."""

    member: str = ""
    """Pod name, ``engine-N`` for one without a pod, ``trainer``, or empty when several are concerned."""
    what: str
    """Who has not come and why, or which variable differs and who has which value."""


class RefitProgress(_Told):
    """The refit under way."""

    refit: str
    version: int
    epoch: int
    phase: str
    attempt: int = 1
    started_at: str | None = None
    """When the phase began, in RFC 3339."""
    deadline_seconds: float = 0.0
    """How long the phase may last from its beginning on; 0 when nothing bounds it."""
    waiting_for: tuple[str, ...] = ()
    """The first of those whose answer is missing."""


class RefitAttempt(_Told):
    """One attempt of a refit that lost a member and was made again without it."""

    epoch: int
    lost: tuple[str, ...] = ()
    """Pod names."""
    phase: str = ""
    """Where the first of them was lost."""
    why: str = ""
    seconds: float = 0.0


class RefitEntry(_Told):
    """One refit that has ended."""

    refit: str = ""
    """Its id; empty in entries of checkpoints that never began."""
    version: int = 0
    epoch: int = 0
    outcome: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    members: int = 0
    engines: int = 0
    """How many engines the fleet should have had."""
    missing: tuple[str, ...] = ()
    """Engines that were left behind because they had not come in time."""
    nbytes: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    """By phase."""
    pause_seconds: float = 0.0
    gigabytes_per_second: float = 0.0
    transport: str = ""
    staged: bool = False
    slowest: str = ""
    """Pod and local rank that had the version last."""
    slowest_lag_seconds: float = 0.0
    """How much later than the engine in the middle."""
    attempts: tuple[RefitAttempt, ...] = ()
    phase: str = ""
    member: str = ""
    code: str = ""
    message: str = ""


class RefitHistory(_Told):
    """The refits that a sync job remembers, the newest last."""

    refits: tuple[RefitEntry, ...] = ()

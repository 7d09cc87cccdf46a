"""What must survive the sync job: epoch, committed version and the refit that was under way."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Intent(_Stored):
    """Written before the first engine pauses: engines are about to hold this version, uncommitted."""

    epoch: int = Field(ge=0)
    version: int = Field(ge=1)
    attempt: int = Field(default=1, ge=1)
    repair: bool = False
    """The version is the committed one, on its way to engines that lack it."""


class Record(_Stored):
    """The durable part of a WeightSync's status; everything else there is a report."""

    epoch: int = Field(default=0, ge=0)
    version: int = Field(default=0, ge=0)
    intent: Intent | None = None
    held: str = ""
    """Why whole engines refuse requests since a refit failed; empty while they serve."""

    @model_validator(mode="after")
    def _finished_intent_is_none(self) -> Self:
        if self.intent is not None and self.intent.version <= self.version and not self.intent.repair:
            return self.model_copy(update={"intent": None})
        return self

    def above(self, epoch: int, version: int) -> "Record":
        """The same record with epoch and version raised to at least these floors."""
        return self.model_copy(update={"epoch": max(self.epoch, epoch), "version": max(self.version, version)})

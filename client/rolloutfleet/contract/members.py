"""Who belongs to a fleet right now: written by the operator, watched by the sync job."""

from collections import Counter
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


class Member(BaseModel):
    """One engine pod that should take part in refits."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    engine: int = Field(ge=0)
    pod_name: str
    pod_uid: str
    address: str = Field(description="address is the pod's IP address, empty until it has one.")
    ranks: int = Field(ge=1, description="ranks is the number of worker processes in the pod.")
    leaving: bool = Field(
        default=False,
        description="leaving says that the pod serves still and is about to go: nobody waits for it any more.",
    )


class Roster(BaseModel):
    """The fleet's members ordered by engine, and how many engines it should have."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    fleet: str
    fleet_uid: str
    engines: int = Field(
        ge=0,
        description="engines is the number of engines that the fleet should have, those that are retired not counted.",
    )
    retired: tuple[int, ...] = Field(
        default=(),
        description="retired are the engines that failed too often; none has a member, and nobody waits for them.",
    )
    members: tuple[Member, ...]

    @model_validator(mode="after")
    def _one_member_per_engine(self) -> Self:
        repeated = sorted(engine for engine, count in Counter(m.engine for m in self.members).items() if count > 1)
        if repeated:
            raise ValueError(f"roster of fleet {self.fleet} holds more than one member for engines {repeated}")
        return self

    @property
    def missing(self) -> tuple[int, ...]:
        """Engines that should have a member and have none."""
        there = {member.engine for member in self.members} | set(self.retired)
        return tuple(engine for engine in range(self.engines + len(self.retired)) if engine not in there)

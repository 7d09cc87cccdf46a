"""Stored objects -> models, with every fault in one message."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.fleetstatus import RolloutFleetStatus
from rolloutfleet_operator.api.weightsync import WeightSyncSpec, WeightSyncStatus
from rolloutfleet_operator.errors import InvalidSpecError

Body = Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)


def parse_fleet_spec(body: Body) -> RolloutFleetSpec:
    """The fleet's spec.

    Raises:
        InvalidSpecError: names every field that breaks a rule, the rule, and the fields that were given.
    """
    return _parse(RolloutFleetSpec, body.get("spec") or {}, "spec")


def parse_weightsync_spec(body: Body) -> WeightSyncSpec:
    """The WeightSync's spec.

    Raises:
        InvalidSpecError: as :func:`parse_fleet_spec`.
    """
    return _parse(WeightSyncSpec, body.get("spec") or {}, "spec")


def parse_fleet_status(body: Body) -> RolloutFleetStatus:
    """The fleet's status as last written, empty when there is none.

    Raises:
        InvalidSpecError: the stored status does not fit this version of the operator.
    """
    return _parse(RolloutFleetStatus, body.get("status") or {}, "status")


def parse_weightsync_status(body: Body) -> WeightSyncStatus:
    """The WeightSync's status, empty when there is none.

    Raises:
        InvalidSpecError: the stored status does not fit this version of the operator.
    """
    return _parse(WeightSyncStatus, body.get("status") or {}, "status")


def _parse(model: type[Model], content: Mapping[str, Any], path: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = sorted(_fault(path, fault["loc"], fault["msg"]) for fault in error.errors(include_url=False))
        given = ", ".join(sorted(content)) or "nothing"
        raise InvalidSpecError(f"{'; '.join(faults)} (given below {path}: {given})") from error


def _fault(path: str, location: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join([path, *map(str, location)])}: {message.removeprefix('Value error, ')}"

"""``rolloutfleet revive``."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rolloutfleet.cli.cluster import Cluster
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.mending_arguments import ReviveOptions
from rolloutfleet.contract.revival import ANNOTATION, LONGEST, parse_revival, render_revival


def revive_engines(options: ReviveOptions, cluster: Cluster, now: datetime) -> None:
    """Asks the operator for another chance for retired engines; Failure when one is not retired, or the API refuses."""
    namespace = options.namespace or cluster.namespace
    fleet = cluster.fleet(options.fleet, namespace)
    engines = options.engines or retired_engines(fleet)
    value = ask_for(fleet, options.engines, now)
    cluster.annotate(options.fleet, namespace, ANNOTATION, value)
    names = f"engine {engines[0]} gets" if len(engines) == 1 else f"engines {', '.join(map(str, engines))} get"
    print(
        f"{names} another chance in fleet {namespace}/{options.fleet}; watch: rolloutfleet status {options.fleet} -n {namespace} --watch"
    )


def retired_engines(fleet: Mapping[str, Any]) -> tuple[int, ...]:
    """The engines that the operator has retired."""
    records = _recovery(fleet).get("engines") or ()
    return tuple(sorted(record["engine"] for record in records if record.get("retired")))


def ask_for(fleet: Mapping[str, Any], engines: tuple[int, ...], now: datetime) -> str:
    """The annotation's next value: these engines, or all where none is named, and what has been asked for and not been obeyed yet.

    Raises Failure for an engine that is not retired.
    """
    name = f"{fleet['metadata']['namespace']}/{fleet['metadata']['name']}"
    retired = retired_engines(fleet)
    if not retired:
        raise Failure(
            f"no engine of fleet {name} is retired, so there is nothing to revive; see status.recovery of the fleet"
        )
    wrong = [engine for engine in engines if engine not in retired]
    if wrong:
        raise Failure(
            f"engine {wrong[0]} of fleet {name} is not retired; retired are: {', '.join(str(engine) for engine in retired)}"
        )
    asked: frozenset[int] | None = frozenset(engines) if engines else None
    waiting = str((fleet["metadata"].get("annotations") or {}).get(ANNOTATION, ""))[:LONGEST]
    if waiting and waiting != _recovery(fleet).get("revived", "") and asked is not None:
        before = parse_revival(waiting)
        asked = None if before is None else asked | before
    value = render_revival(asked, now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    if len(value) > LONGEST:
        raise Failure(
            f"{len(asked or ())} engines at once are more than the annotation {ANNOTATION} holds; name fewer, or give --all"
        )
    return value


def _recovery(fleet: Mapping[str, Any]) -> Mapping[str, Any]:
    return (fleet.get("status") or {}).get("recovery") or {}

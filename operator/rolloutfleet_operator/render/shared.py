"""Objects of the fleet as a whole: the token, the Services, the roster."""

from rolloutfleet.contract import names
from rolloutfleet.contract.members import Roster
from rolloutfleet_operator import naming
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.revision import compact_json


def render_token(fleet: FleetIdentity, token: str) -> Manifest:
    """The Secret with the fleet's bearer token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": fleet.metadata(naming.token_name(fleet.name), naming.ROLE_SHARED),
        "stringData": {names.TOKEN_KEY: token},
        "type": "Opaque",
    }


def render_services(fleet: FleetIdentity) -> list[Manifest]:
    """The Services: generation on every Ready engine, a DNS name for every engine's leader, and the sync pod."""
    generation = {"name": "generation", "port": names.GENERATION_PORT, "protocol": "TCP", "targetPort": "generation"}
    control = {"name": "control", "port": names.WORKER_CONTROL_PORT, "protocol": "TCP", "targetPort": "control"}
    sync = {"name": "sync", "port": names.SYNC_PORT, "protocol": "TCP", "targetPort": "sync"}
    leaders, sync_pods = fleet.selector(naming.ROLE_LEADER), fleet.selector(naming.ROLE_SYNC)
    return [
        _service(fleet, naming.generation_service_name(fleet.name), {"ports": [generation], "selector": leaders}),
        _service(
            fleet,
            naming.engines_service_name(fleet.name),
            {
                "clusterIP": "None",
                "ports": [generation, control],
                # The sync job and the members of an engine need each other's names before any of them is Ready.
                "publishNotReadyAddresses": True,
                "selector": leaders,
            },
        ),
        _service(fleet, naming.sync_name(fleet.name), {"ports": [sync], "selector": sync_pods}),
    ]


def render_members(fleet: FleetIdentity, roster: Roster) -> Manifest:
    """The ConfigMap that the sync job watches."""
    return {
        "apiVersion": "v1",
        "data": {names.MEMBERS_KEY: compact_json(roster.model_dump(mode="json", by_alias=True, exclude_defaults=True))},
        "kind": "ConfigMap",
        "metadata": fleet.metadata(naming.members_name(fleet.name), naming.ROLE_SHARED),
    }


def _service(fleet: FleetIdentity, name: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": fleet.metadata(name, naming.ROLE_SHARED),
        "spec": {**spec, "type": "ClusterIP"},
    }

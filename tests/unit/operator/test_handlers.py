"""kopf's side: what is watched, what wakes whom, what the process is told."""

import asyncio
import dataclasses
import json
import logging

import kopf
import pytest

from rolloutfleet_operator.__main__ import read_config
from rolloutfleet_operator.handlers.indexes import index_child, index_node, index_pod, observe_brief, observe_indexes
from rolloutfleet_operator.handlers.registry import Handlers
from rolloutfleet_operator.handlers.settings import configure
from rolloutfleet_operator.logs import JsonFormatter, TextFormatter
from rolloutfleet_operator.plan.observe import observe_fleet
from rolloutfleet_operator.reconcile.weightsyncs import sync_wake_key

LABELS = {"rolloutfleet.io/fleet": "demo", "rolloutfleet.io/role": "leader"}


def raw(name="x", **fields):
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "creationTimestamp": "2026-01-02T03:04:05Z"}
    return {"metadata": metadata | fields.pop("metadata", {})} | fields


def test_children_are_filtered_by_the_server_and_nodes_are_not(runtime):
    settings = kopf.OperatorSettings()
    configure(settings, runtime.config)
    selectors = settings.watching.label_selectors
    assert selectors["", "v1", "pods"] == "app.kubernetes.io/managed-by=rolloutfleet-operator"
    assert ("", "v1", "nodes") not in selectors
    assert settings.persistence.finalizer == "rolloutfleet.io/operator"
    assert settings.scanning.disabled
    assert settings.background.instant_exit_timeout == 2.0


def test_there_are_daemons_and_no_change_handlers(runtime):
    registry = Handlers(runtime).registry
    assert {h.id for h in registry._spawning.get_all_handlers()} == {"fleet", "weightsync"}
    assert list(registry._changing.get_all_handlers()) == []


def test_nodes_are_watched_only_when_they_may_be_read(runtime):
    def indexes(reads_nodes):
        handlers = Handlers(dataclasses.replace(runtime, reads_nodes=reads_nodes)).registry
        return {handler.id for handler in handlers._indexing.get_all_handlers()}

    assert indexes(True) - indexes(False) == {"nodes"}


async def test_indexes_hold_values_and_leave_out_what_is_not_ours():
    assert await index_pod(body=raw()) == {}
    (value,) = (await index_pod(body=raw(metadata={"labels": LABELS}))).values()
    assert value.name == "x"
    (child,) = (await index_child(body=raw(metadata={"labels": LABELS}, data={}), param="ConfigMap")).values()
    assert (child.kind, child.content["data"]) == ("ConfigMap", {})
    assert list(await index_node(body=raw())) == ["nodes"]


def test_what_is_observed_comes_in_a_fixed_order(make_pod):
    indexes = {
        "pods": {("rl", "demo"): [make_pod(2), make_pod(0)]},
        "jobs": {},
        "weightsyncs": {},
        "fleets": {},
        "children-Service": {},
    }
    observed = observe_indexes(("rl", "demo"), indexes, reads_nodes=False)
    assert [pod.engine for pod in observed.pods] == [0, 2]
    assert observed.nodes is None
    assert observe_brief(("rl", "demo"), indexes) is None


class TestWakes:
    @pytest.fixture
    def handlers(self, runtime):
        return Handlers(runtime)

    @pytest.fixture
    def fleet_flag(self, runtime):
        return runtime.wakes.open(("rl", "demo"))

    async def tell(self, handler, flag, body, kind="MODIFIED", **kwargs):
        flag.clear()
        await handler(body=body, event={"type": kind}, **kwargs)
        return flag.is_set()

    def fleet(self, generation=1, **status):
        return raw("demo", metadata={"generation": generation}, status=status)

    async def test_the_fleets_own_status_does_not_wake_its_loop(self, handlers, fleet_flag):
        assert await self.tell(handlers._wake_fleet, fleet_flag, self.fleet())
        assert not await self.tell(handlers._wake_fleet, fleet_flag, self.fleet(weights={"version": 3}))
        assert await self.tell(handlers._wake_fleet, fleet_flag, self.fleet(generation=2))

    async def test_the_fleets_weights_wake_its_weightsyncs(self, handlers, runtime):
        flag = runtime.wakes.open(sync_wake_key("rl", "demo"))
        assert await self.tell(handlers._wake_fleet, flag, self.fleet())
        assert await self.tell(handlers._wake_fleet, flag, self.fleet(weights={"version": 3}))
        assert not await self.tell(handlers._wake_fleet, flag, self.fleet(weights={"version": 3}))
        assert await self.tell(handlers._wake_fleet, flag, self.fleet(), "DELETED")

    async def test_our_own_condition_on_a_weightsync_wakes_nobody(self, handlers, fleet_flag):
        spec = {"fleetRef": {"name": "demo"}}
        active = {"conditions": [{"type": "Active", "status": "True"}]}
        assert await self.tell(handlers._wake_weightsync, fleet_flag, raw("s", spec=spec))
        assert not await self.tell(handlers._wake_weightsync, fleet_flag, raw("s", spec=spec, status=active))
        assert await self.tell(handlers._wake_weightsync, fleet_flag, raw("s", spec=spec, status={"version": 1}))

    async def test_a_weightsync_that_goes_is_held_up_until_its_fleet_has_its_version(self, handlers, fleet_flag):
        metadata = {"deletionTimestamp": "2026-01-02T03:05:00Z", "finalizers": ["rolloutfleet.io/operator"]}
        going = raw("s", metadata=metadata, spec={"fleetRef": {"name": "demo"}}, status={"epoch": 2, "version": 5})
        fleets = {("rl", "demo"): [observe_fleet(self.fleet())]}
        handling = asyncio.create_task(handlers._wake_weightsync(body=going, event={"type": None}, fleets=fleets))
        await asyncio.wait_for(fleet_flag.wait(), 5)
        assert not handling.done()
        fleets["rl", "demo"] = [observe_fleet(self.fleet(weights={"epoch": 2, "version": 5}))]
        await handlers._wake_fleet(body=self.fleet(weights={"epoch": 2, "version": 5}), event={"type": "MODIFIED"})
        await asyncio.wait_for(handling, 5)

    async def test_a_child_wakes_its_fleet_when_something_that_matters_changes(self, handlers, fleet_flag):
        def observe(body):
            return body["metadata"].get("matters")

        def child(**metadata):
            return raw("c", metadata={"labels": LABELS} | metadata)

        assert await self.tell(handlers._wake_owner, fleet_flag, child(matters=1), param=observe)
        assert not await self.tell(handlers._wake_owner, fleet_flag, child(matters=1, other=2), param=observe)
        assert await self.tell(handlers._wake_owner, fleet_flag, child(matters=1), "DELETED", param=observe)

    async def test_a_nodes_heartbeat_wakes_nobody(self, handlers, fleet_flag):
        def node(gpus):
            return raw(
                "n", status={"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"lastHeartbeatTime": "x"}]}
            )

        assert await self.tell(handlers._wake_everyone, fleet_flag, node("8"))
        assert not await self.tell(handlers._wake_everyone, fleet_flag, node("8"))
        assert await self.tell(handlers._wake_everyone, fleet_flag, node("4"))


REQUIRED = ["--worker-image", "w", "--operator-image", "o", "--lease-namespace", "system"]


class TestCommandLine:
    def test_flags_go_before_the_environment(self):
        environment = {"ROLLOUTFLEET_WORKER_IMAGE": "env", "ROLLOUTFLEET_RESYNC_SECONDS": "60"}
        config, _ = read_config(REQUIRED, environment)
        assert (config.images.worker, config.resync_seconds) == ("w", 60)

    def test_namespaces_come_from_flags_or_the_environment(self):
        assert read_config([*REQUIRED, "--namespace", "b", "--namespace", "a"], {})[0].namespaces == ("a", "b")
        assert read_config(REQUIRED, {"ROLLOUTFLEET_NAMESPACES": "x, y"})[0].namespaces == ("x", "y")
        assert read_config(REQUIRED, {})[0].namespaces == ()

    def test_what_is_missing_is_named_at_once(self, capsys):
        with pytest.raises(SystemExit):
            read_config([], {})
        assert "--worker-image, --operator-image, --lease-namespace" in capsys.readouterr().err

    def test_help_shows_an_example(self, capsys):
        with pytest.raises(SystemExit):
            read_config(["--help"], {})
        assert "python -m rolloutfleet_operator --namespace rollouts" in capsys.readouterr().out


def test_log_lines_carry_their_fields():
    record = logging.LogRecord("n", logging.INFO, "p", 1, "status changed", (), None)
    record.fields = {"fleet": "demo"}
    assert json.loads(JsonFormatter().format(record)).items() >= {"message": "status changed", "fleet": "demo"}.items()
    assert TextFormatter().format(record).endswith("status changed fleet='demo'")

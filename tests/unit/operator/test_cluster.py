"""Answers of the API server, paths, the Lease, and the checks at start."""

import asyncio
import copy
import json
from types import SimpleNamespace

import pytest

from rolloutfleet.contract.applying import APPLY_TYPE
from rolloutfleet_operator.cluster import gateway as gateway_module
from rolloutfleet_operator.cluster.access import FLEET_RULES, LEASE_RULES, NODE_RULES, check_access, check_served
from rolloutfleet_operator.cluster.answers import refusal
from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.cluster.lease import LeaseHolder, LeaseTerms
from rolloutfleet_operator.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BlockedError,
    ConflictError,
    InvalidSpecError,
    LeaseLostError,
    NotFoundError,
    OperatorError,
    OwnershipConflictError,
    RefusedError,
    SetupError,
    TransientError,
)


def answer(**fields):
    return json.dumps({"message": "words", **fields}).encode()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, answer(), NotFoundError),
        (409, answer(reason="AlreadyExists"), AlreadyExistsError),
        (409, answer(reason="Conflict"), ConflictError),
        (
            409,
            answer(reason="Conflict", details={"causes": [{"reason": "FieldManagerConflict"}]}),
            OwnershipConflictError,
        ),
        (403, answer(message='User "op" cannot create resource "pods"'), AccessDeniedError),
        (403, answer(message='pods "x" is forbidden: violates PodSecurity "restricted"'), RefusedError),
        (403, answer(message="error looking up service account rl/missing"), RefusedError),
        (403, answer(message="pods is forbidden: exceeded quota: gpus"), BlockedError),
        (403, answer(message="namespace rl: because it is being terminated"), BlockedError),
        (400, answer(), InvalidSpecError),
        (422, answer(), InvalidSpecError),
        (401, answer(), TransientError),
        (429, answer(), TransientError),
        (503, b"<html>away</html>", TransientError),
        (418, answer(), OperatorError),
    ],
)
def test_every_refusal_has_its_class_and_keeps_the_servers_words(status, body, error):
    raised = refusal(status, body, None, "POST Pod rl/x")
    assert type(raised) is error
    assert raised.message.startswith("POST Pod rl/x: ")


def test_the_server_says_when_to_come_back():
    assert refusal(429, answer(), "7", "GET x").retry_after == 7
    assert refusal(429, answer(), "Wed, 21 Oct", "GET x").retry_after is None


def test_paths():
    assert ObjectRef("Job", "rl", "a").path() == "/apis/batch/v1/namespaces/rl/jobs/a"
    assert ObjectRef("Pod", "rl", "a/b").path("status") == "/api/v1/namespaces/rl/pods/a%2Fb/status"
    assert ObjectRef("WeightSync", "rl", "a").path() == "/apis/rolloutfleet.io/v1alpha1/namespaces/rl/weightsyncs/a"


class FakeApi:
    """The client's API object: answers in turn, and what was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.rest_client = self
        self.configuration = SimpleNamespace(host="https://server")

    async def update_params_for_auth(self, headers, *args):
        headers["authorization"] = "Bearer token"

    async def request(self, method, url, *, headers, body, _request_timeout):
        self.asked.append((method, url, headers))
        status, content, extra = self.answers.pop(0)
        if isinstance(content, Exception):
            raise content

        async def read():
            return content

        return SimpleNamespace(status=status, headers=extra, read=read)


POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "rl"}}


@pytest.fixture
def without_pauses(monkeypatch):
    monkeypatch.setattr(gateway_module, "RETRY_DELAYS_SECONDS", (0, 0))


class TestGateway:
    async def test_writes_are_strict_and_carry_our_name(self):
        api = FakeApi((201, b"{}", {}), (200, b"{}", {}))
        gateway = Gateway(api, 5)
        await gateway.create(POD, dry_run=True)
        await gateway.apply(POD, force=False, subresource="status")
        (create, create_url, _), (apply, apply_url, headers) = api.asked
        assert (create, apply) == ("POST", "PATCH")
        assert create_url.startswith("https://server/api/v1/namespaces/rl/pods?fieldManager=rolloutfleet-operator")
        assert "fieldValidation=Strict" in create_url
        assert "dryRun=All" in create_url
        assert "/pods/x/status?" in apply_url
        assert "force=false" in apply_url
        assert headers["Content-Type"] == APPLY_TYPE

    async def test_a_server_that_is_away_is_asked_again(self, without_pauses):
        api = FakeApi((503, b"", {}), (0, ConnectionResetError("gone"), {}), (200, b'{"a": 1}', {}))
        assert await Gateway(api, 5).get(ObjectRef("Pod", "rl", "x")) == {"a": 1}

    async def test_a_server_that_stays_away_is_an_error_that_names_the_request(self, without_pauses):
        api = FakeApi(*[(0, TimeoutError(), {})] * 3)
        with pytest.raises(TransientError, match="GET Pod rl/x: the API server did not answer: TimeoutError"):
            await Gateway(api, 5).get(ObjectRef("Pod", "rl", "x"))

    async def test_a_server_that_says_when_to_come_back_is_obeyed(self):
        api = FakeApi((429, answer(), {"Retry-After": "9"}))
        with pytest.raises(TransientError) as caught:
            await Gateway(api, 5).get(ObjectRef("Pod", "rl", "x"))
        assert caught.value.retry_after == 9

    async def test_the_very_object_is_deleted_and_no_successor_of_its_name(self):
        api = FakeApi((409, answer(reason="Conflict"), {}))
        with pytest.raises(ConflictError):
            await Gateway(api, 5).delete(ObjectRef("Pod", "rl", "x"), "uid")


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


class LeaseServer:
    """One Lease, with optimistic locking."""

    def __init__(self):
        self.lease = None
        self.down = False
        self.version = 0

    async def get(self, ref):
        if self.down:
            raise TransientError("down")
        if self.lease is None:
            raise NotFoundError("no lease")
        return copy.deepcopy(self.lease)

    async def call(self, method, path, what, *, body):
        if self.lease is not None:
            raise AlreadyExistsError("there")
        return self._store(body)

    async def replace(self, manifest):
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed")
        return self._store(manifest)

    def _store(self, manifest):
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    @property
    def holder(self):
        return self.lease["spec"]["holderIdentity"]


@pytest.fixture
def server():
    return LeaseServer()


@pytest.fixture
def holder(server):
    def make(identity, clock):
        terms = LeaseTerms("lease", "rl", identity, duration=15, renew=0.0, deadline=10)
        return LeaseHolder(server, terms, clock)

    return make


async def acquire(holder):
    met = []
    await asyncio.wait_for(holder.acquire(met.append), 5)
    return met


async def test_the_first_takes_the_lease_and_another_waits_until_it_has_not_changed_for_its_duration(server, holder):
    clock = Clock()
    assert await acquire(holder("a", clock)) == []
    waiting = []

    def told(name):
        waiting.append(name)
        clock.time += 16

    await asyncio.wait_for(holder("b", clock).acquire(told), 5)
    assert waiting == ["a"]
    assert (server.holder, server.lease["spec"]["leaseTransitions"]) == ("b", 2)


async def test_a_released_lease_is_free_at_once(server, holder):
    clock = Clock()
    first = holder("a", clock)
    await acquire(first)
    await first.release()
    assert await acquire(holder("b", clock)) == []


async def test_releasing_does_not_touch_another_holders_lease(server, holder):
    await acquire(holder("a", Clock()))
    await holder("b", Clock()).release()
    assert server.holder == "a"


async def test_a_holder_ends_when_another_has_the_lease(server, holder):
    mine = holder("a", Clock())
    await acquire(mine)
    server.lease["spec"]["holderIdentity"] = "b"
    with pytest.raises(LeaseLostError, match="is held by b now"):
        await asyncio.wait_for(mine.hold(), 5)


async def test_a_holder_ends_when_it_cannot_renew_in_time(server, holder):
    clock = Clock()
    mine = holder("a", clock)
    await acquire(mine)
    get = server.get

    async def away(ref):
        clock.time += 3
        server.down = True
        return await get(ref)

    server.get = away
    with pytest.raises(LeaseLostError, match="was not renewed for 10 s"):
        await asyncio.wait_for(mine.hold(), 5)


class AccessServer:
    def __init__(self, denied=(), served=()):
        self.denied = set(denied)
        self.served = served

    async def call(self, method, path, what, *, body=None):
        if method == "GET":
            if self.served is None:
                raise NotFoundError("no such group")
            return {"resources": [{"name": name} for name in self.served]}
        asked = body["spec"]["resourceAttributes"]
        name = f"{asked['resource']}/{asked['subresource']}".rstrip("/")
        return {"status": {"allowed": (asked["verb"], name) not in self.denied}}


async def test_every_missing_permission_is_listed_with_its_place():
    server = AccessServer({("create", "pods"), ("patch", "weightsyncs/status")})
    with pytest.raises(SetupError) as caught:
        await check_access(server, ["rl"], "system")
    assert caught.value.message.endswith(
        "create pods in namespace rl; patch weightsyncs/status.rolloutfleet.io in namespace rl"
    )


async def test_a_namespaced_operator_does_without_nodes_and_one_for_the_cluster_does_not():
    server = AccessServer({("watch", "nodes")})
    assert await check_access(server, ["rl"], "rl") is False
    with pytest.raises(SetupError, match="watch nodes in the cluster"):
        await check_access(server, [], "rl")
    assert await check_access(AccessServer(), [], "rl") is True


@pytest.mark.parametrize(
    ("served", "missing"),
    [
        (None, "rolloutfleets, rolloutfleets/status, weightsyncs, weightsyncs/status"),
        (["rolloutfleets", "rolloutfleets/status", "weightsyncs"], "weightsyncs/status"),
    ],
)
async def test_missing_crds_are_named(served, missing):
    with pytest.raises(SetupError, match=f"does not serve {missing} of"):
        await check_served(AccessServer(served=served))


def test_the_operator_asks_for_no_wildcards_and_no_reading_of_all_secrets():
    rules = [*FLEET_RULES, *LEASE_RULES, *NODE_RULES]
    assert all("*" not in (rule.group, rule.resource, *rule.verbs) for rule in rules)
    (secrets,) = [rule for rule in rules if rule.resource == "secrets"]
    assert not {"list", "watch"} & set(secrets.verbs)

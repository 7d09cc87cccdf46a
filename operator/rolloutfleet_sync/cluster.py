"""Roster and status in Kubernetes: the only module of the sync job that speaks to an API server.

Every write of the status carries the resourceVersion of the last read. A write that is refused, or whose answer is lost, is followed by a
read: epoch, version and intent are then either what they were (write again), what they should be (the write had got through), or somebody
else's (:class:`~rolloutfleet_sync.store.StoreConflictError`).
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from pydantic import ValidationError

from rolloutfleet.contract.applying import APPLY_TYPE, apply_body
from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.names import GROUP, MEMBERS_KEY
from rolloutfleet_sync.log import logger
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.summary import Readiness
from rolloutfleet_sync.store import StoreConflictError, StoreError, parse_record, render_document

FIELD_MANAGER = "rolloutfleet-sync"
VERSION = "v1alpha1"
REQUEST_SECONDS = 5.0
RETRY_SECONDS = 0.2
WATCH_SECONDS = 240
RELIST_SECONDS = 1.0

_NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError)
"""What a connection that breaks can look like; one that breaks inside a JSON document leaves half of it."""


class ApiError(Exception):
    """The API server answered, but not with a success."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {message}")


class Api:
    """Requests to the API server, with deadlines."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls) -> "Api":
        """A client for ``KUBECONFIG`` when it is set, else for the cluster around this pod."""
        configuration = Configuration()
        if os.environ.get("KUBECONFIG"):
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | bytes | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> aiohttp.ClientResponse:
        """The response, body unread; raises ApiError and what aiohttp raises."""
        prepared = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*prepared, _request_timeout=aiohttp.ClientTimeout(total=seconds))
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 300:
            text = (await response.read())[:500].decode(errors="replace")
            raise ApiError(response.status, _status_message(text))
        return response

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The object at a path."""
        response = await self.request("GET", path, query)
        found: dict[str, Any] = await response.json()
        return found


def _status_message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text


class ConfigMapRoster:
    """The roster in the fleet's members ConfigMap, followed by a watch."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._name = name

    async def watch(self) -> AsyncIterator[Roster]:
        selector = {"fieldSelector": f"metadata.name={self._name}"}
        while True:
            try:
                listed = await self._api.get(self._path, selector)
                for item in listed["items"]:
                    async for roster in self._parse(item):
                        yield roster
                query = selector | {
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "timeoutSeconds": str(WATCH_SECONDS),
                    "resourceVersion": listed["metadata"]["resourceVersion"],
                }
                response = await self._api.request("GET", self._path, query, seconds=WATCH_SECONDS + 30)
                async with response:
                    while line := await response.content.readline():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        if event["type"] in {"ADDED", "MODIFIED"}:
                            async for roster in self._parse(event["object"]):
                                yield roster
            except (ApiError, *_NETWORK_ERRORS) as error:
                logger.warning("members cannot be watched", extra={"configmap": self._name, "error": str(error)})
            await asyncio.sleep(RELIST_SECONDS)

    async def _parse(self, item: Mapping[str, Any]) -> AsyncIterator[Roster]:
        content = (item.get("data") or {}).get(MEMBERS_KEY)
        try:
            if content is not None:
                yield Roster.model_validate_json(content)
        except ValidationError as error:
            logger.error("roster cannot be understood", extra={"configmap": self._name, "error": str(error)})


class WeightSyncStatus:
    """The status of the sync job's own WeightSync."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/weightsyncs/{name}"
        self._where = f"WeightSync {namespace}/{name}"
        self._version = ""
        self._generation = 0
        self._stored: dict[str, Any] = {}
        self._written: dict[str, Any] | None = None

    async def read(self) -> Record:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                found = await self._fetch()
        except (ApiError, *_NETWORK_ERRORS) as error:
            raise StoreError(f"{self._where} cannot be read: {error or type(error).__name__}") from error
        floor = (found.get("spec") or {}).get("floor") or {}
        self._written = None
        return parse_record(self._stored, self._where).above(floor.get("epoch", 0), floor.get("version", 0))

    async def write(self, status: Mapping[str, Any], readiness: Readiness, seconds: float) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reason = ""
        believed = parse_record(self._stored, self._where)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    document = render_document(status, readiness, self._stored, self._generation, now)
                    if document == self._written:
                        return
                    try:
                        await self._apply(document)
                    except ApiError as error:
                        reason = str(error)
                        if error.status in {400, 403, 404, 422}:
                            raise StoreError(f"{self._where} refuses its status: {error}") from error
                    except _NETWORK_ERRORS as error:
                        reason = str(error) or type(error).__name__
                    else:
                        self._written = document
                        return
                    if await self._is_stored(document, believed):
                        self._written = document
                        return
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError as error:
            raise StoreError(f"{self._where} was not written within {seconds:g} s: {reason or 'no answer'}") from error

    async def _fetch(self) -> dict[str, Any]:
        found = await self._api.get(self._path)
        self._note(found)
        return found

    def _note(self, found: Mapping[str, Any]) -> None:
        self._version = found["metadata"]["resourceVersion"]
        self._generation = found["metadata"].get("generation", 0)
        self._stored = dict(found.get("status") or {})

    async def _apply(self, document: Mapping[str, Any]) -> None:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "WeightSync",
            "metadata": {"name": self._name, "namespace": self._namespace, "resourceVersion": self._version},
            "status": document,
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        response = await self._api.request(
            "PATCH", f"{self._path}/status", query, apply_body(body), content_type=APPLY_TYPE
        )
        self._note(await response.json())

    async def _is_stored(self, document: Mapping[str, Any], believed: Record) -> bool:
        """Whether a write whose answer was lost got through; False when it may be repeated."""
        try:
            await self._fetch()
        except (ApiError, *_NETWORK_ERRORS):
            return False
        found = parse_record(self._stored, self._where)
        if found == parse_record(document, self._where) and found != believed:
            return True
        if found != believed:
            raise StoreConflictError(
                f"another sync job has written {self._where}: it holds epoch {found.epoch} and version {found.version}, "
                f"this one had left epoch {believed.epoch} and version {believed.version}; one sync job works for a fleet"
            )
        return False

"""A small typed gateway to the API server: get, create, apply, replace, delete, each with a deadline and our own errors."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from rolloutfleet.contract.applying import APPLY_TYPE, apply_body
from rolloutfleet_operator import naming
from rolloutfleet_operator.cluster.answers import refusal
from rolloutfleet_operator.cluster.kinds import ObjectRef, collection_path
from rolloutfleet_operator.errors import InvalidSpecError, SetupError, TransientError

Body = dict[str, Any]

RETRY_DELAYS_SECONDS = (0.2, 1.0)
"""Pauses before the second and the third attempt of a request that the server did not answer."""

_JSON = "application/json"
_WRITER = {"fieldManager": naming.FIELD_MANAGER, "fieldValidation": "Strict"}
"""Strict: a field that the server does not know is an error, where it would silently be dropped otherwise."""


class Gateway:
    """The API server as the operator uses it.

    Every method raises :class:`~rolloutfleet_operator.errors.OperatorError`: ``TransientError`` after the last attempt, ``NotFoundError``,
    ``AlreadyExistsError``, ``ConflictError``, ``OwnershipConflictError`` (a field belongs to another manager), ``InvalidSpecError``
    (the server refuses the content), ``BlockedError`` (quota, namespace that ends), ``RefusedError`` (policy) or ``AccessDeniedError``.
    """

    def __init__(self, api: client.ApiClient, timeout_seconds: float) -> None:
        self._api: Any = api
        self._timeout = timeout_seconds

    @classmethod
    async def connect(cls, timeout_seconds: float) -> "Gateway":
        """A gateway with the pod's service account, or else the kubeconfig.

        Raises:
            SetupError: there is neither.
        """
        configuration = client.Configuration()
        loader: Any = config  # its functions carry no types
        try:
            loader.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            try:
                await loader.load_kube_config(client_configuration=configuration)
            except config.ConfigException as error:
                raise SetupError(
                    f"neither a service account nor a kubeconfig to reach the API server with: {error}"
                ) from error
        return cls(client.ApiClient(configuration), timeout_seconds)

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.close()

    async def get(self, ref: ObjectRef) -> Body:
        """The object as stored now."""
        return await self.call("GET", ref.path(), str(ref))

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Body:
        """The object that was made; with ``dry_run`` the server only says whether it would."""
        ref = ObjectRef.of(manifest)
        query = _WRITER | ({"dryRun": "All"} if dry_run else {})
        return await self.call("POST", collection_path(ref.kind, ref.namespace), str(ref), query=query, body=manifest)

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, subresource: str = "") -> Body:
        """The object after server-side apply; ``force`` takes fields over from other managers."""
        ref = ObjectRef.of(manifest)
        query = _WRITER | {"force": "true" if force else "false"}
        return await self.call(
            "PATCH", ref.path(subresource), str(ref), query=query, body=apply_body(manifest), content_type=APPLY_TYPE
        )

    async def replace(self, manifest: Mapping[str, Any]) -> Body:
        """The object after an update that fails when the stored one is newer than ``metadata.resourceVersion``."""
        ref = ObjectRef.of(manifest)
        return await self.call("PUT", ref.path(), str(ref), query=_WRITER, body=manifest)

    async def delete(self, ref: ObjectRef, uid: str) -> None:
        """Deletes the very object with that UID; its dependents go in the background. One that is gone is no error."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        await self.call("DELETE", ref.path(), str(ref), body=options)

    async def call(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | bytes | None = None,
        content_type: str = _JSON,
    ) -> Body:
        """The answer to one request; ``what`` names it in errors. Requests are safe to repeat: names and UIDs are given."""
        attempt = 0
        while True:
            try:
                return await self._once(method, path, what, query or {}, body, content_type)
            except TransientError as error:
                if attempt == len(RETRY_DELAYS_SECONDS) or error.retry_after is not None:
                    raise
            await asyncio.sleep(RETRY_DELAYS_SECONDS[attempt])
            attempt += 1

    async def _once(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | bytes | None,
        content_type: str,
    ) -> Body:
        headers = {"Accept": _JSON, "Content-Type": content_type, "User-Agent": naming.FIELD_MANAGER}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._api.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._api.rest_client.request(
                    method, url, headers=headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=self._timeout)
                )
                content: bytes = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(
                f"{method} {what}: the API server did not answer: {str(error) or type(error).__name__}"
            ) from error
        if answer.status >= 300:
            raise refusal(answer.status, content, answer.headers.get("Retry-After"), f"{method} {what}")
        parsed = json.loads(content)
        if not isinstance(parsed, dict):
            raise InvalidSpecError(f"{method} {what}: the answer is not an object")
        return parsed

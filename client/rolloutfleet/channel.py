"""Calls to a fleet's sync job: contract messages in and out, failures as :class:`~rolloutfleet.errors.RolloutFleetError`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rolloutfleet.contract.names import API_PREFIX, CONTRACT_VERSION
from rolloutfleet.contract.problems import Problem
from rolloutfleet.errors import ContractMismatch, FleetUnreachable, RolloutFleetError, Unauthorized, error_of

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a fleet is and how its token is to be had, for messages."""

    url: str
    fleet: str
    namespace: str

    @property
    def token_command(self) -> str:
        """The command that prints the fleet's token."""
        return f"kubectl get secret {self.fleet}-token -n {self.namespace} -o jsonpath='{{.data.token}}' | base64 -d"


class Channel:
    """An authenticated HTTP client of one sync job; safe to use from several threads."""

    def __init__(self, target: Target, token: str, timeout: float) -> None:
        self.target = target
        self._timeout = timeout
        self._client = httpx.Client(
            base_url=f"{target.url}{API_PREFIX}/",
            headers={"authorization": f"Bearer {token}"},
            timeout=timeout,
            trust_env=False,
        )

    def get(
        self, path: str, answer: type[Answer], *, query: Mapping[str, str] | None = None, held: float = 0.0
    ) -> Answer:
        """The parsed answer to a GET that the server may hold open for ``held`` seconds."""
        return self._parse(answer, self._send("GET", path, params=query, timeout=self._timeout + held))

    def post(self, path: str, body: BaseModel | None, answer: type[Answer], *, held: float = 0.0) -> Answer:
        """The parsed answer to a POST that the server may hold open for ``held`` seconds."""
        return self._parse(answer, self._send("POST", path, content=_dump(body), timeout=self._timeout + held))

    def tell(self, path: str, body: BaseModel) -> None:
        """A POST whose answer carries nothing."""
        self._send("POST", path, content=_dump(body))

    def delete(self, path: str) -> None:
        """A DELETE whose answer carries nothing."""
        self._send("DELETE", path)

    def close(self) -> None:
        """Closes idle connections; calls in other threads fail."""
        self._client.close()

    def _send(
        self,
        method: str,
        path: str,
        *,
        content: str | None = None,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        try:
            response = self._client.request(
                method,
                path,
                content=content,
                params=params,
                headers={"content-type": "application/json"} if content is not None else None,
                timeout=timeout or self._timeout,
            )
        except httpx.HTTPError as error:
            raise FleetUnreachable(_unreachable(self.target, error)) from error
        if response.is_success:
            return response
        raise self._failure(response)

    def _failure(self, response: httpx.Response) -> RolloutFleetError:
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            problem = None
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return Unauthorized(
                f"{self.target.url} refuses this token; fleet {self.target.fleet}'s own is printed by: {self.target.token_command}",
                problem=problem,
            )
        if problem is not None:
            return error_of(problem)
        return FleetUnreachable(
            f"{self.target.url} answered {response.status_code} to {response.request.method} {response.request.url.path} "
            f"and not as a rolloutfleet sync job does; check that the address is that of the Service {self.target.fleet}-sync"
        )

    def _parse(self, answer: type[Answer], response: httpx.Response) -> Answer:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            spoken = _contract_version(response)
            if spoken not in {None, CONTRACT_VERSION}:
                raise contract_mismatch(self.target.url, spoken) from error
            raise FleetUnreachable(
                f"{self.target.url} answered {response.request.url.path} with something that is no {answer.__name__}; check that the "
                f"address is that of the Service {self.target.fleet}-sync, port 8080 ({error.error_count()} faults)"
            ) from error


def contract_mismatch(url: str, spoken: int | None) -> ContractMismatch:
    """The error for a fleet that speaks another contract version."""
    return ContractMismatch(
        f"the fleet at {url} speaks contract version {spoken}, this client version {CONTRACT_VERSION}; "
        "install the rolloutfleet client of the operator's release"
    )


def _contract_version(response: httpx.Response) -> int | None:
    try:
        body = response.json()
    except ValueError:
        return None
    version = body.get("contractVersion") if isinstance(body, dict) else None
    return version if isinstance(version, int) else None


def _unreachable(target: Target, error: httpx.HTTPError) -> str:
    reason = str(error) or type(error).__name__
    return (
        f"no answer from fleet {target.fleet} at {target.url}: {reason}. From outside the cluster, forward its port with "
        f"`kubectl port-forward -n {target.namespace} service/{target.fleet}-sync 8080` and connect to http://127.0.0.1:8080; "
        f"inside, see whether the sync job runs with `kubectl get pods -n {target.namespace} -l rolloutfleet.io/fleet={target.fleet}`"
    )


def _dump(body: BaseModel | None) -> str | None:
    return None if body is None else body.model_dump_json(by_alias=True)

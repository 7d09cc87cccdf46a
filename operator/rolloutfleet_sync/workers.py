"""Calls to the launchers in the engine pods."""

import asyncio
import io
import json

import aiohttp
from pydantic import ValidationError

from rolloutfleet.contract.addresses import control_base
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.names import API_PREFIX, CONTRACT_VERSION, WORKER_CONTROL_PORT
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import Call, Check
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.events import CallAnswered, CallFailed
from rolloutfleet_sync.protocol.machine import ANSWERS
from rolloutfleet_sync.protocol.model import Verb

CONNECT_SECONDS = 3.0
KEEPALIVE_SECONDS = 3.0
"""Shorter than a server's own limit, so that no call is written to a connection that is being closed."""

ONE_PIECE_BYTES = 32 * 1024


class WorkerCaller:
    """Calls launchers at the same time as often as it is asked to; one per process."""

    def __init__(self, token: str, control_port: int = WORKER_CONTROL_PORT) -> None:
        self._token = token
        self._control_port = control_port
        self._session: aiohttp.ClientSession | None = None
        self._manifest: tuple[Manifest, bytes] | None = None

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, command: CallWorker) -> CallAnswered | CallFailed:
        """The launcher's answer, or why there is none; never raises but when cancelled."""
        verb = command.verb.value or "report"
        try:
            async with asyncio.timeout(command.seconds):
                status, body = await self._exchange(command)
        except TimeoutError:
            message = f"{command.pod_name} did not answer {verb} within {command.seconds:.1f} s"
            return _failed(command, ProblemCode.DEADLINE_EXCEEDED, message)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            message = f"{command.pod_name} at {command.address} did not answer {verb}: {reason}"
            return _failed(command, ProblemCode.MEMBER_ABSENT, message)
        if status != 200:
            return CallFailed(command.call, _parse_problem(command, status, body), refused=True)
        try:
            return CallAnswered(command.call, ANSWERS[command.verb].model_validate_json(body))
        except ValidationError as error:
            return CallFailed(command.call, _explain(command, body, error), refused=True)

    async def _exchange(self, command: CallWorker) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        url = f"{control_base(command.address, self._control_port)}{API_PREFIX}/worker"
        if command.message is None:
            request = self._session.get(url)
        else:
            headers = {"Content-Type": "application/json"}
            rendered = self._render(command.message)
            # A large manifest is sent in pieces, so that it blocks nobody; anything else leaves in one packet with its headers.
            body = rendered if len(rendered) <= ONE_PIECE_BYTES else io.BytesIO(rendered)
            request = self._session.post(f"{url}/{command.verb.value}", data=body, headers=headers)
        async with request as response:
            return response.status, await response.read()

    def _render(self, message: Call) -> bytes:
        """JSON of a message; a manifest, which may hold tens of thousands of tensors, is rendered once for all members."""
        if not isinstance(message, Check):
            return message.model_dump_json(by_alias=True).encode()
        if self._manifest is None or self._manifest[0] is not message.manifest:
            self._manifest = (message.manifest, message.manifest.model_dump_json().encode())
        head = message.model_dump_json(by_alias=True, exclude={"manifest"}).encode()
        return head[:-1] + b',"manifest":' + self._manifest[1] + b"}"


def _failed(command: CallWorker, code: ProblemCode, message: str) -> CallFailed:
    return CallFailed(command.call, Problem(code=code, message=message, member=command.pod_name), refused=False)


def _parse_problem(command: CallWorker, status: int, body: bytes) -> Problem:
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        text = body[:200].decode(errors="replace")
        problem = Problem(
            code=ProblemCode.UNAUTHORIZED if status == 401 else ProblemCode.ENGINE_FAILED,
            message=f"answered HTTP {status} to {command.verb.value or 'report'}: {text}",
        )
    message = problem.message if command.pod_name in problem.message else f"{command.pod_name}: {problem.message}"
    return problem.model_copy(update={"member": command.pod_name, "message": message})


def _explain(command: CallWorker, body: bytes, error: ValidationError) -> Problem:
    version = _contract_version(body) if command.verb is Verb.REPORT else CONTRACT_VERSION
    if version != CONTRACT_VERSION:
        return Problem(
            code=ProblemCode.CONTRACT_MISMATCH,
            message=(
                f"{command.pod_name} speaks contract version {version}, the sync job {CONTRACT_VERSION}; "
                "use worker and operator images of one release"
            ),
            member=command.pod_name,
        )
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return Problem(
        code=ProblemCode.ENGINE_FAILED,
        message=f"{command.pod_name} gave an answer that cannot be understood: {field}: {first['msg']}",
        member=command.pod_name,
    )


def _contract_version(body: bytes) -> object:
    """The version that an unintelligible report claims to be of."""
    try:
        report = json.loads(body)
    except ValueError:
        return CONTRACT_VERSION
    return report.get("contractVersion", CONTRACT_VERSION) if isinstance(report, dict) else CONTRACT_VERSION

"""Roster and status in files: the sync job without Kubernetes, for one person with one machine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolloutfleet.contract.members import Roster
from rolloutfleet_sync.log import logger
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.summary import Readiness
from rolloutfleet_sync.store import StoreError, parse_record, render_document

LOOK_SECONDS = 0.5


class FileRoster:
    """The roster in a JSON file, looked at twice a second."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def watch(self) -> AsyncIterator[Roster]:
        seen: bytes | None = None
        while True:
            content = await asyncio.to_thread(self._read)
            if content is not None and content != seen:
                seen = content
                try:
                    yield Roster.model_validate_json(content)
                except ValidationError as error:
                    logger.error(
                        "roster file cannot be understood", extra={"path": str(self._path), "error": str(error)}
                    )
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None


class FileStatus:
    """The status in a JSON file, replaced as a whole and flushed to the disk before a write counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._previous: dict[str, Any] = {}

    async def read(self) -> Record:
        try:
            content = await asyncio.to_thread(self._read)
            self._previous = json.loads(content) if content else {}
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._path} cannot be read: {error}") from error
        return parse_record(self._previous, str(self._path))

    async def write(self, status: Mapping[str, Any], readiness: Readiness, seconds: float) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = render_document(status, readiness, self._previous, 0, now)
        if document == self._previous:
            return
        try:
            async with asyncio.timeout(seconds):
                await asyncio.to_thread(self._replace, json.dumps(document, indent=2))
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        except TimeoutError as error:
            raise StoreError(f"{self._path} was not written within {seconds:g} s") from error
        self._previous = document

    def _read(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""

    def _replace(self, text: str) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

"""One daemon of the cluster: how it is started, and how one sees that it serves."""

import hashlib
import http.client
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localcluster import processes
from localcluster.errors import LauncherError
from localcluster.packages import SEARCH_PATH
from localcluster.paths import Paths
from localcluster.progress import say


@dataclass(frozen=True, slots=True)
class Health:
    """Where health is asked: an http(s) URL that answers 200, or a unix socket that accepts (`unix:///…`).

    Without `authority` (a PEM file) an https answer is taken from any certificate: for components that make
    their own on loopback.
    """

    url: str
    authority: Path | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """A daemon: `ports` are (address, port) pairs that must be free before it starts, `config` files it reads."""

    name: str
    argv: tuple[str, ...]
    health: Health
    ports: tuple[tuple[str, int], ...] = ()
    config: tuple[Path, ...] = ()
    patience: float = 60.0

    def digest(self) -> str:
        """Key of command line and configuration: a running daemon with another digest is out of date."""
        digest = hashlib.sha256("\0".join(self.argv).encode())
        for file in self.config:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def probe(health: Health, seconds: float = 2.0) -> str:
    """What is wrong, in a few words; the empty string when the component is healthy."""
    parts = urllib.parse.urlsplit(health.url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(seconds)
                client.connect(parts.path)
            return ""
        connection = _connect(parts, health, seconds)
        try:
            headers = {"Authorization": f"Bearer {health.token}"} if health.token else {}
            connection.request("GET", parts.path, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode(errors="replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return "" if answer.status == 200 else f"HTTP {answer.status}: {' '.join(body.split())[:120]}"


def _connect(parts: urllib.parse.SplitResult, health: Health, seconds: float) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    context = ssl.create_default_context(cafile=str(health.authority) if health.authority else None)
    if health.authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)


def log_path(paths: Paths, name: str) -> Path:
    return paths.logs / f"{name}.log"


def running(paths: Paths, name: str) -> processes.Record | None:
    """The record of a daemon that lives now, or None."""
    record = processes.read_record(paths.run, name)
    return record if record is not None and processes.is_alive(record.identity) else None


def start_missing(paths: Paths, components: Iterable[Component]) -> list[str]:
    """Starts those components that do not run and returns their names; says which running ones are out of date."""
    started = []
    env = {
        "PATH": f"{SEARCH_PATH}:{os.environ.get('PATH', '')}",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
    }
    for component in components:
        record = running(paths, component.name)
        digest = component.digest()
        if record is None:
            log = log_path(paths, component.name)
            argv = component.argv
            processes.start(component.name, argv, state=paths.state, log=log, run=paths.run, digest=digest, env=env)
            started.append(component.name)
        elif record.digest != digest:
            say(f"{component.name} runs with an older configuration; `down` and `up` bring in the new one")
    return started


def await_healthy(paths: Paths, components: Iterable[Component]) -> None:
    """Returns when all are healthy.

    Raises LauncherError with the end of the log of one that died, or that is not healthy within its patience.
    """
    begin = time.monotonic()
    for component in components:
        while complaint := probe(component.health):
            if running(paths, component.name) is None:
                log = log_path(paths, component.name)
                raise LauncherError(f"{component.name} ended at once; the last lines of {log}:\n{processes.tail(log)}")
            if time.monotonic() - begin > component.patience:
                log = log_path(paths, component.name)
                raise LauncherError(
                    f"{component.name} is not healthy after {component.patience:.0f} s ({complaint}); "
                    f"the last lines of {log}:\n{processes.tail(log)}"
                )
            time.sleep(0.05)


def stop_components(paths: Paths, names: Iterable[str], seconds: float = processes.TERM_SECONDS) -> None:
    """Ends the named daemons together and forgets them; those that do not run are no error."""
    wanted = list(names)
    processes.stop([record.identity for name in wanted if (record := running(paths, name))], seconds)
    for name in wanted:
        processes.record_path(paths.run, name).unlink(missing_ok=True)

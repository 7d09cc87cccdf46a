"""What runs, since when, and how it is."""

import time
from collections.abc import Iterable, Sequence

from localcluster.apiclient import ApiClient, node_is_ready
from localcluster.components import Component, probe, running
from localcluster.errors import LauncherError
from localcluster.kwok import ANNOTATION
from localcluster.paths import Paths


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns that line up; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def describe_age(seconds: float) -> str:
    """A duration as people say it: 12s, 5m, 3h, 2d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def component_rows(paths: Paths, components: Iterable[Component]) -> tuple[list[list[str]], bool]:
    """(table rows with a head, everything runs and is healthy)."""
    rows = [["COMPONENT", "PID", "HEALTH", "SINCE"]]
    well = True
    for component in components:
        record = running(paths, component.name)
        if record is None:
            rows.append([component.name, "-", "not running", "-"])
            well = False
            continue
        complaint = probe(component.health)
        well = well and not complaint
        age = describe_age(time.time() - record.started_at)
        rows.append([component.name, str(record.identity.pid), complaint or "healthy", age])
    return rows, well


def node_rows(paths: Paths) -> list[list[str]]:
    """Table rows of real nodes one by one, fake ones as one line; a row with the reason when the API is silent."""
    rows = [["NODE", "KIND", "READY", "ADDRESS"]]
    try:
        nodes = ApiClient(paths).list_all("/api/v1/nodes")
    except (LauncherError, FileNotFoundError) as error:
        return [*rows, ["-", "-", "unknown", " ".join(str(error).split())[:80]]]
    fake = [node for node in nodes if node["metadata"].get("annotations", {}).get(ANNOTATION) == "fake"]
    for node in nodes:
        if node in fake:
            continue
        addresses = {a["type"]: a["address"] for a in node.get("status", {}).get("addresses", [])}
        ready = "yes" if node_is_ready(node) else "no"
        rows.append([node["metadata"]["name"], "kubelet", ready, addresses.get("InternalIP", "-")])
    if fake:
        ready_count = sum(node_is_ready(node) for node in fake)
        rows.append([f"{len(fake)} fake", "kwok", f"{ready_count}", "-"])
    return rows

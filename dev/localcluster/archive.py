"""Image archives: written here for the pause image, brought into the nodes' containerds for all."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localcluster.cache import content_key, publish, write_atomically
from localcluster.components import running
from localcluster.constants import NODE_NAMES, PAUSE_IMAGE
from localcluster.gobuild import ensure_module
from localcluster.paths import Paths
from localcluster.progress import run, say


@dataclass(frozen=True, slots=True)
class Archive:
    """A docker-archive file of one tagged image; `key` changes exactly when the content does."""

    tag: str
    key: str
    file: Path


def render_image(program: bytes, tag: str) -> bytes:
    """A docker-archive of an image that holds one static program, run as an unprivileged user."""
    layer = _tar({"pause": (program, 0o755)})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created_by": "localcluster"}],
    }
    encoded = json.dumps(config, sort_keys=True).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode()
    return _tar({"layer.tar": (layer, 0o644), name: (encoded, 0o644), "manifest.json": (manifest, 0o644)})


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def pause_archive(paths: Paths) -> Archive:
    """The image of pod sandboxes, made from `dev/go/pause`."""
    program = ensure_module(paths, "pause") / "pause"
    key = content_key([program], {"tag": PAUSE_IMAGE}, program.parent)
    folder = paths.cache / "images" / key

    def build(out: Path) -> None:
        (out / "image.tar").write_bytes(render_image(program.read_bytes(), PAUSE_IMAGE))

    publish(folder, build)
    return Archive(PAUSE_IMAGE, key, folder / "image.tar")


def current_file(paths: Paths) -> Path:
    return paths.cache / "images" / "current.json"


def built_archives(paths: Paths) -> list[Archive]:
    """The project images that `images` built last and whose files are still there."""
    file = current_file(paths)
    entries: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    archives = [Archive(tag, key, paths.cache / "images" / key / "image.tar") for tag, key in sorted(entries.items())]
    return [archive for archive in archives if archive.file.exists()]


def import_archives(paths: Paths, archives: list[Archive]) -> list[str]:
    """Brings archives into every running containerd that lacks them; returns "TAG into NODE" for each import."""

    def into(name: str) -> list[str]:
        marker = paths.node(name) / "containerd" / "images.json"
        known: dict[str, str] = json.loads(marker.read_text()) if marker.exists() else {}
        imported = []
        for archive in archives:
            if known.get(archive.tag) == archive.key:
                continue
            address = ["ctr", "--address", str(paths.containerd_socket(name)), "--namespace", "k8s.io"]
            run([*address, "images", "import", str(archive.file)], state=paths.state, seconds=900)
            known[archive.tag] = archive.key
            write_atomically(marker, json.dumps(known, sort_keys=True))
            imported.append(f"{archive.tag} into {name}")
        return imported

    nodes = [name for name in NODE_NAMES if running(paths, f"containerd-{name}")]
    with ThreadPoolExecutor(len(NODE_NAMES)) as pool:
        done = [line for lines in pool.map(into, nodes) for line in lines]
    for line in done:
        if not line.startswith(PAUSE_IMAGE):
            say(f"imported {line}")
    return done

"""The project's images for the local cluster, built from its own Dockerfiles on Debian bases made here."""

import json
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localcluster import buildah
from localcluster.archive import Archive, current_file, import_archives
from localcluster.cache import content_key, exclusive, publish, write_atomically
from localcluster.constants import OPERATOR_IMAGE, WORKER_IMAGE
from localcluster.errors import LauncherError
from localcluster.packages import IMAGES, ensure_packages
from localcluster.paths import Paths
from localcluster.progress import run_long, say

SUITE = "bookworm"
_COPY = re.compile(r"^\s*(?:COPY|ADD)\s+(?!.*--from=)((?:--\S+\s+)*)(.+)$", re.MULTILINE)
_MOUNT = re.compile(r"--mount=(\S+)")
_REQUIREMENTS = re.compile(r"requirements/[\w.-]+\.txt")
_IGNORED = {"__pycache__", ".venv", ".git"}


@dataclass(frozen=True, slots=True)
class ProjectImage:
    """One deployable: its Dockerfile and the one of its local base, both relative to the checkout."""

    name: str
    tag: str
    dockerfile: str
    base: str


PROJECT_IMAGES: Mapping[str, ProjectImage] = {
    "operator": ProjectImage("operator", OPERATOR_IMAGE, "operator/Dockerfile", "dev/images/operator-base.Dockerfile"),
    "worker": ProjectImage("worker", WORKER_IMAGE, "worker_image/Dockerfile", "dev/images/worker-base.Dockerfile"),
}


def context_sources(dockerfile: str) -> list[str]:
    """Sorted paths of the build context that a Dockerfile reads: by COPY, ADD, or bind mounts of RUN."""
    text = dockerfile.replace("\\\n", " ")
    found: set[str] = set()
    for match in _COPY.finditer(text):
        found.update(match.group(2).split()[:-1])
    for match in _MOUNT.finditer(text):
        options = dict(part.partition("=")[::2] for part in match.group(1).split(","))
        if options.get("type", "bind") == "bind" and "from" not in options:
            found.add(options.get("source") or options.get("src") or ".")
    return sorted(path.strip("/") or "." for path in found)


def source_files(context: Path, sources: Iterable[str]) -> list[Path]:
    """Files below the sources, what builds ignore left out. Raises LauncherError for a source that is missing."""
    files: list[Path] = []
    for source in sources:
        matched = sorted(context.glob(source)) if any(c in source for c in "*?[") else [context / source]
        for path in matched:
            if path.is_dir():
                inside = (p for p in path.rglob("*") if p.is_file() or p.is_symlink())
                files += [p for p in inside if not _IGNORED & set(p.relative_to(context).parts)]
            elif path.exists():
                files.append(path)
            else:
                raise LauncherError(f"{path} is missing, and the Dockerfile takes it; `make wheels` makes build/wheels")
    return sorted(set(files))


def wheel_key(wheel: Path) -> str:
    """Key of what a wheel holds, its time stamps left out: a wheel built again from the same sources keeps its key."""
    with zipfile.ZipFile(wheel) as archive:
        return json.dumps(sorted((entry.filename, entry.CRC) for entry in archive.infolist()))


def image_key(context: Path, dockerfile: Path, base_key: str) -> str:
    """Content key of a project image: its Dockerfile, every file it takes, and its base."""
    files = source_files(context, context_sources(dockerfile.read_text()))
    wheels = {str(file.relative_to(context)): wheel_key(file) for file in files if file.suffix == ".whl"}
    others = [file for file in files if file.suffix != ".whl"]
    return content_key([dockerfile, *others], {"base": base_key, **wheels}, context)


def build_images(paths: Paths, environment: Mapping[str, str], names: Iterable[str]) -> list[Archive]:
    """Builds the named images whose inputs changed, and imports them into running nodes.

    Raises LauncherError when not root, when a Dockerfile is missing, or when a build fails.
    """
    if not buildah.owned_by_root():
        raise LauncherError("`images` needs root: debootstrap and buildah's overlay store do")
    ensure_packages(paths, IMAGES)
    archives = []
    with exclusive(paths.cache / "images" / ".lock"):
        for name in names:
            archives.append(_project_image(paths, environment, PROJECT_IMAGES[name]))
            _remember(paths, archives[-1])
    if not import_archives(paths, archives):
        say("running nodes have these images already" if paths.run.is_dir() else "the next `up` imports them")
    return archives


def _project_image(paths: Paths, environment: Mapping[str, str], image: ProjectImage) -> Archive:
    dockerfile = paths.repository / image.dockerfile
    if not dockerfile.exists():
        raise LauncherError(f"{dockerfile} is missing: nothing to build {image.tag} from")
    base_key, base_tag = _base_key(paths, image)
    key = image_key(paths.repository, dockerfile, base_key)
    folder = paths.cache / "images" / key

    def build(out: Path) -> None:
        _ensure_base(paths, image, base_tag)
        wheelhouse = _wheelhouse(paths, environment, dockerfile, base_key, base_tag)
        scratch = f"localhost/rolloutfleet-build-{image.name}:{key}"
        volumes = buildah.build_volumes(environment, wheelhouse)
        buildah.build(
            paths,
            what=image.name,
            dockerfile=dockerfile,
            context=paths.repository,
            base=base_tag,
            tag=scratch,
            volumes=volumes,
        )
        buildah.export(paths, scratch, out / "image.tar", image.tag)
        buildah.remove_image(paths, scratch)

    if not publish(folder, build):
        say(f"{image.tag} is up to date ({key})")
    return Archive(image.tag, key, folder / "image.tar")


def _remember(paths: Paths, archive: Archive) -> None:
    file = current_file(paths)
    entries: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    previous = entries.get(archive.tag)
    write_atomically(file, json.dumps({**entries, archive.tag: archive.key}, indent=1, sort_keys=True))
    if previous and previous != archive.key:
        shutil.rmtree(paths.cache / "images" / previous, ignore_errors=True)


def _base_key(paths: Paths, image: ProjectImage) -> tuple[str, str]:
    key = content_key([paths.repository / image.base], {"suite": SUITE}, paths.repository)
    return key, f"localhost/rolloutfleet-{image.name}-base:{key}"


def _ensure_base(paths: Paths, image: ProjectImage, tag: str) -> None:
    if buildah.image_exists(paths, tag):
        return
    debian = f"localhost/rolloutfleet-debian:{SUITE}"
    if not buildah.image_exists(paths, debian):
        _debian(paths, debian)
    context = paths.dev / "images"
    what = f"{image.name}-base"
    buildah.build(
        paths, what=what, dockerfile=paths.repository / image.base, context=context, base=debian, tag=tag, volumes=[]
    )


def _debian(paths: Paths, tag: str) -> None:
    """Debian's minimal system as an image, by debootstrap from the mirror that it takes by default."""

    def build(out: Path) -> None:
        root = out / "root"
        argv = ["debootstrap", "--variant=minbase", SUITE, str(root)]
        run_long(f"bootstrapping Debian {SUITE}", argv, state=paths.state, log=paths.cache / "logs" / "debootstrap.log")
        with tarfile.open(out / "root.tar", "w") as archive:
            archive.add(root, arcname=".", filter=_without_caches)
        shutil.rmtree(root)

    folder = paths.cache / "debian" / SUITE
    publish(folder, build)
    context = paths.cache / "debian" / f"{SUITE}-context"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
    (context / "root.tar").unlink(missing_ok=True)
    (context / "root.tar").hardlink_to(folder / "root.tar")
    file = context / "Dockerfile"
    buildah.build(paths, what="debian", dockerfile=file, context=context, base="scratch", tag=tag, volumes=[])


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    cached = entry.name.startswith(("./var/cache/apt/", "./var/lib/apt/lists/")) and entry.isfile()
    return None if cached else entry


def _wheelhouse(paths: Paths, environment: Mapping[str, str], dockerfile: Path, base_key: str, base_tag: str) -> Path:
    """Folder with the wheels of the requirement files that a Dockerfile names; empty when it names none."""
    named = sorted(set(_REQUIREMENTS.findall(dockerfile.read_text())))
    requirements = [paths.repository / name for name in named if (paths.repository / name).exists()]
    key = content_key(requirements, {"base": base_key}, paths.repository)
    folder = paths.cache / "wheels" / key

    def build(out: Path) -> None:
        if requirements:
            buildah.download_wheels(paths, environment, base_tag, requirements, out)

    publish(folder, build)
    return folder


def forget_bases(paths: Paths) -> None:
    """Drops the Debian bases, so that the next build makes them with today's packages."""
    for image in PROJECT_IMAGES.values():
        buildah.remove_image(paths, _base_key(paths, image)[1])
    buildah.remove_image(paths, f"localhost/rolloutfleet-debian:{SUITE}")
    for folder in (paths.cache / "debian" / SUITE, current_file(paths).parent):
        shutil.rmtree(folder, ignore_errors=True)

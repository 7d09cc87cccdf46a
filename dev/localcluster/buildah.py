"""buildah with a store of its own in the cache, and what a build on this machine needs to reach the package index."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from localcluster.paths import Paths
from localcluster.progress import run, run_long

WHEELHOUSE = "/wheelhouse"
_CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE")


def command(paths: Paths, *arguments: str) -> list[str]:
    """A buildah command line on our own store."""
    store = paths.cache / "containers"
    return [
        "buildah",
        "--root",
        str(store / "root"),
        "--runroot",
        str(store / "run"),
        "--storage-driver",
        "overlay",
        *arguments,
    ]


def render_pip_configuration(environment: Mapping[str, str], wheels: bool) -> str:
    """/etc/pip.conf for the time of a build: this machine's CA bundle if it has one of its own, and the wheelhouse.

    With a wheelhouse the index is not asked: what the named requirement files do not pin does not get in.
    """
    lines = ["[global]", "disable-pip-version-check = true"]
    if certificate_bundle(environment):
        lines.append(f"cert = {WHEELHOUSE}/ca.crt")
    if wheels:
        lines += [f"find-links = {WHEELHOUSE}", "no-index = true"]
    return "\n".join(lines) + "\n"


def certificate_bundle(environment: Mapping[str, str]) -> str | None:
    """The CA bundle that this machine's environment prescribes, if it prescribes one."""
    return next((environment[name] for name in _CERTIFICATES if environment.get(name)), None)


def build_volumes(environment: Mapping[str, str], wheelhouse: Path) -> list[str]:
    """`--volume` arguments that give a build pip's settings, without a word about them in the Dockerfile."""
    bundle = certificate_bundle(environment)
    if bundle:
        shutil.copyfile(bundle, wheelhouse / "ca.crt")
    configuration = wheelhouse / "pip.conf"
    configuration.write_text(render_pip_configuration(environment, any(wheelhouse.glob("*.whl"))))
    return ["--volume", f"{wheelhouse}:{WHEELHOUSE}:ro", "--volume", f"{configuration}:/etc/pip.conf:ro"]


def image_exists(paths: Paths, tag: str) -> bool:
    """Whether our store has an image of this tag."""
    listing = run(command(paths, "images", "--format", "{{.Name}}:{{.Tag}}"), state=paths.state)
    return tag in listing.split()


def build(paths: Paths, *, what: str, dockerfile: Path, context: Path, base: str, tag: str, volumes: list[str]) -> None:
    """Builds a Dockerfile whose base image is `ARG BASE`. Raises LauncherError with the end of the build's log."""
    argv = command(
        paths,
        "bud",
        "--isolation=chroot",
        "--pull-never",
        "--format=docker",
        # The store knows nothing of bind mounts' contents, so its layer cache would serve old wheels.
        "--layers=false",
        f"--build-arg=BASE={base}",
        f"--file={dockerfile}",
        f"--tag={tag}",
        *volumes,
        str(context),
    )
    log = paths.cache / "logs" / f"image-{what.replace(' ', '-')}.log"
    run_long(f"building the image {tag}", argv, state=paths.state, log=log, env={"BUILDAH_ISOLATION": "chroot"})


def export(paths: Paths, tag: str, file: Path, name: str) -> None:
    """Writes an image of the store as a docker-archive that carries the tag `name`."""
    file.unlink(missing_ok=True)
    run(command(paths, "push", "--quiet", tag, f"docker-archive:{file}:{name}"), state=paths.state, seconds=600)


def remove_image(paths: Paths, tag: str) -> None:
    """Removes an image from the store if it is there."""
    if image_exists(paths, tag):
        run(command(paths, "rmi", tag), state=paths.state)


def download_wheels(
    paths: Paths, environment: Mapping[str, str], base: str, requirements: list[Path], target: Path
) -> None:
    """Fills `target` with the wheels of hashed requirement files, by the base image's own pip, for later builds."""
    container = run(command(paths, "from", "--pull-never", base), state=paths.state).strip()
    try:
        volumes = build_volumes(environment, target)
        mounts = [
            *volumes[2:],
            f"--volume={target}:{WHEELHOUSE}:rw",
            f"--volume={requirements[0].parent}:/requirements:ro",
        ]
        files = [argument for file in requirements for argument in ("-r", f"/requirements/{file.name}")]
        download = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", WHEELHOUSE, *files]
        argv = command(paths, "run", "--isolation=chroot", *mounts, container, "--", *download)
        run_long("downloading pinned wheels", argv, state=paths.state, log=paths.cache / "logs" / "wheels.log")
    finally:
        run(command(paths, "rm", container), state=paths.state)


def owned_by_root() -> bool:
    """Builds need root: the store's overlay mounts and debootstrap do."""
    return os.geteuid() == 0

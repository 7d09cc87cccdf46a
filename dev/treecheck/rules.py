"""Each `find_*` function names the files of a checkout that break one rule, sorted, with what to do."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 500
"""Longest module; past about 400 lines it wants to be two."""

TEXT_SUFFIXES = frozenset(
    {"", ".cfg", ".in", ".json", ".md", ".py", ".svg", ".sum", ".mod", ".go", ".toml", ".tpl", ".txt", ".yaml", ".yml"}
)
# Built from parts, so that this file does not break its own rule.
_REGISTRIES = (r"pypi\." + "org", r"pythonhosted\." + "org", r"proxy\.golang\." + "org", r"registry\.npmjs\." + "org")
_FOREIGN = re.compile("|".join((*_REGISTRIES, r"(?<![\w/.])/(?:home|root|Users|work)/" + r"(?!me\b|user\b)[\w.-]+")))
_MADE_HERE = re.compile(r"\.venv|build|dist|__pycache__|.+\.egg-info|\..+_cache|\.hypothesis")
_VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "misc", "common"})


def list_files(root: Path) -> list[Path]:
    """Files that belong to the checkout at `root`, relative to it, sorted.

    In a git checkout those that git tracks or would track; in an unpacked archive all but what our own targets make.
    """
    if not (root / ".git").exists():
        present = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return sorted(path for path in present if not any(_MADE_HERE.fullmatch(part) for part in path.parts))
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return sorted(Path(name) for name in set(listing.stdout.split("\0")) if name and (root / name).is_file())


def find_operator_package(root: Path) -> list[str]:
    """A package file in `operator/` would shadow Python's own module of that name."""
    path = Path("operator") / "__init__.py"
    return [f"{path}: remove it; it shadows the standard library's operator module"] if (root / path).exists() else []


def find_long_modules(root: Path, files: list[Path]) -> list[str]:
    """Python modules above :data:`MODULE_LINES`."""
    counts = ((path, len((root / path).read_text().splitlines())) for path in _python(files))
    return [f"{path}: {lines} lines, at most {MODULE_LINES}; part it" for path, lines in counts if lines > MODULE_LINES]


def find_vague_names(files: list[Path]) -> list[str]:
    """Modules and packages whose name says nothing."""
    return [
        f"{path}: name it for its one idea" for path in _python(files) if _VAGUE_NAMES & {path.stem, path.parent.name}
    ]


def find_foreign_names(root: Path, files: list[Path]) -> list[str]:
    """Lines that hold a path of somebody's machine or the host name of a package registry."""
    faults = []
    for path in files:
        if path.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate((root / path).read_text().splitlines(), start=1):
            match = _FOREIGN.search(line)
            if match:
                faults.append(f"{path}:{number}: {match[0]!r} belongs to one machine or registry")
    return faults


def find_faults(root: Path) -> list[str]:
    """Every fault of the checkout at `root`, one sentence each."""
    files = list_files(root)
    return [
        *find_operator_package(root),
        *find_long_modules(root, files),
        *find_vague_names(files),
        *find_foreign_names(root, files),
    ]


def _python(files: list[Path]) -> Iterator[Path]:
    return (path for path in files if path.suffix == ".py")

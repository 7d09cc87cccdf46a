"""``python -m generate [--check] ROOT``: write the generated files, or fail with a diff when one is out of date."""

import argparse
import difflib
import sys
from pathlib import Path

from generate.api_reference import render_api_reference
from generate.architecture import render_architecture
from generate.chart import render_chart_crds, render_chart_readme
from generate.conditions import render_conditions
from generate.crds import render_crds
from generate.placement import render_placement_example
from generate.roles import render_chart_rules


def render_all(root: Path) -> dict[Path, str]:
    """Text of each generated file by its path below `root`."""
    files = render_crds(root)
    crds = {name: text for name, text in files.items() if name != "kustomization.yaml"}
    return {
        **{Path("crds") / name: text for name, text in files.items()},
        **render_chart_crds(crds),
        Path("charts/rolloutfleet/templates/_rules.tpl"): render_chart_rules(),
        Path("charts/rolloutfleet/README.md"): render_chart_readme(root),
        Path("docs/api.md"): render_api_reference(crds),
        Path("docs/conditions.md"): render_conditions(root),
        Path("docs/architecture.svg"): render_architecture(),
        Path("docs/placement.svg"): render_placement_example(root),
    }


def find_strays(root: Path, wanted: dict[Path, str]) -> list[Path]:
    """Files in the generated folders that nothing generates."""
    folders = (root / "crds", root / "charts/rolloutfleet/templates/crds")
    present = [path.relative_to(root) for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted(path for path in present if path not in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m generate", description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; print the difference and fail")
    arguments = parser.parse_args()
    root: Path = arguments.root
    wanted = render_all(root)
    strays = find_strays(root, wanted)
    stale = {path: text for path, text in wanted.items() if _read(root / path) != text}
    if arguments.check:
        for path, text in sorted(stale.items()):
            before = _read(root / path).splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(before, text.splitlines(keepends=True), str(path), "generated"))
        for path in strays:
            print(f"{path}: nothing generates it")
        if stale or strays:
            print("generated files are out of date: run make generate")
            return 1
        return 0
    for path, text in sorted(stale.items()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        print(f"wrote {path}")
    for path in strays:
        (root / path).unlink()
        print(f"removed {path}")
    return 0


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())

"""House rules of the checkout itself, and that each of them can fail."""

import subprocess
from pathlib import Path

import pytest

from treecheck.rules import MODULE_LINES, find_faults, list_files

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_checkout_keeps_the_rules():
    assert find_faults(ROOT) == []


def test_a_clean_tree_has_no_faults(checkout: Path):
    write(checkout / "operator/thing/__init__.py", '"""A thing."""\n')
    assert find_faults(checkout) == []


def test_a_package_file_in_operator_is_found_although_git_ignores_it(checkout: Path):
    write(checkout / ".gitignore", "operator/\n")
    write(checkout / "operator/__init__.py")
    assert find_faults(checkout) == [
        "operator/__init__.py: remove it; it shadows the standard library's operator module"
    ]


def test_a_long_module_is_found(checkout: Path):
    write(checkout / "long.py", "x = 1\n" * (MODULE_LINES + 1))
    write(checkout / "fits.py", "x = 1\n" * MODULE_LINES)
    assert find_faults(checkout) == [f"long.py: {MODULE_LINES + 1} lines, at most {MODULE_LINES}; part it"]


@pytest.mark.parametrize("path", ["pkg/utils.py", "helpers/pods.py"])
def test_a_name_that_says_nothing_is_found(checkout: Path, path: str):
    write(checkout / path)
    assert find_faults(checkout) == [f"{path}: name it for its one idea"]


@pytest.mark.parametrize("text", ["/ho" + "me/ada/checkout", "https://py" + "pi.org/simple", "/ro" + "ot/models"])
def test_a_machine_or_registry_is_found_with_its_line(checkout: Path, text: str):
    write(checkout / "README.md", f"fine\nsee {text}\n")
    (fault,) = find_faults(checkout)
    assert fault.startswith("README.md:2: ")


def test_ignored_files_are_left_alone(checkout: Path):
    write(checkout / ".gitignore", "build/\n")
    write(checkout / "build/utils.py")
    assert list_files(checkout) == [Path(".gitignore")]


def test_an_unpacked_archive_is_read_without_git(tmp_path: Path):
    write(tmp_path / "README.md")
    write(tmp_path / ".venv/lib/utils.py")
    write(tmp_path / "client/rolloutfleet.egg-info/PKG-INFO")
    assert list_files(tmp_path) == [Path("README.md")]

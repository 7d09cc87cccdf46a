"""The kernels themselves, in Triton's interpreter, through every test of the tables. Runs where torch and Triton are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.parametrize("tests", ["test_tiles_copying.py", "test_tiles_digesting.py"])
def test_every_test_of_the_tables_passes_on_interpreted_kernels(tests: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / tests)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def test_tables_on_cpus_leave_triton_alone() -> None:
    script = (
        "import sys, torch; from rolloutfleet.layout.blocks import Block; from rolloutfleet.tiles.copying import CopyTable\n"
        "from rolloutfleet.tiles.digesting import SumTable; a = torch.arange(8); b = Block(0, 1, 8, 8)\n"
        "CopyTable.build([(a, b, a.clone(), b)]).run(); SumTable.build([(a, b, 0, b, 4)], sources=1).run()\n"
        "assert 'triton' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)

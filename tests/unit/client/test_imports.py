"""Importing the client loads nothing heavy."""

import subprocess
import sys

import pytest


def loaded_by(statement: str) -> set[str]:
    listing = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.row("A43")
@pytest.mark.parametrize(
    "statement",
    [
        "import rolloutfleet",
        "import rolloutfleet; rolloutfleet.connect; rolloutfleet.Fleet; rolloutfleet.RefitFailed; rolloutfleet.Sampling",
        "import rolloutfleet.buckets, rolloutfleet.digest, rolloutfleet.session, rolloutfleet.refit",
        "import rolloutfleet.layout",
    ],
)
def test_the_client_needs_neither_torch_nor_vllm_nor_kubernetes_nor_numpy(statement: str) -> None:
    assert loaded_by(statement).isdisjoint({"torch", "vllm", "kubernetes", "numpy"})


def test_the_contract_alone_does_not_load_the_client() -> None:
    assert "httpx" not in loaded_by("import rolloutfleet.contract.trainer")


def test_every_exported_name_exists_and_others_do_not() -> None:
    import rolloutfleet

    assert all(getattr(rolloutfleet, name) is not None for name in rolloutfleet.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        rolloutfleet.conect  # noqa: B018

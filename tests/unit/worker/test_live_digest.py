"""The digest of live weights is one, however much of it is summed at once, and ends when nobody waits for it any more."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from rolloutfleet_worker.rank import live_digest as module  # noqa: E402 - only where vLLM is
from rolloutfleet_worker.rank.live_digest import live_digest  # noqa: E402 - only where vLLM is


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Embedding(11, 3), torch.nn.Linear(7, 2, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("together", [1, 100, 1 << 30])
def test_it_does_not_matter_how_much_is_summed_at_once(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    whole = live_digest(model())
    monkeypatch.setattr(module, "_TOGETHER_BYTES", together)
    assert live_digest(model()) == whole
    changed = model()
    with torch.no_grad():
        changed[2].bias[1] += 1
    assert live_digest(changed) != whole


def test_a_model_without_weights_has_a_digest_too() -> None:
    assert len(live_digest(torch.nn.Identity())) == 64


def test_it_ends_between_two_tensors_once_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOGETHER_BYTES", 1)
    cancelled, summed, build = threading.Event(), [], module.SumTable.build

    def build_and_cancel(entries, sources):
        summed.append(len(entries))
        cancelled.set()
        return build(entries, sources)

    monkeypatch.setattr(module.SumTable, "build", build_and_cancel)
    with pytest.raises(ConnectionAbortedError, match="not wanted any more"):
        live_digest(model(), cancelled=cancelled)
    assert summed == [1]

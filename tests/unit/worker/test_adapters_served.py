"""What vLLM's API server offers of an adapter's versions, and the files behind them."""

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet_worker import adapter_files
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, measure, private_folder, version_folder, write_version
from rolloutfleet_worker.middleware import (
    ENGINE_PREFIX,
    ENV_ENGINE_NAME,
    ENV_ENGINE_SECRET,
    SECRET_HEADER,
    FleetMiddleware,
)
from rolloutfleet_worker.served_adapters import ServedAdapters

SPEC = AdapterSpec(name="style", rank=8, alpha=16, target_modules=("q_proj",))


@dataclass
class Request:
    lora_name: str
    lora_int_id: int
    lora_path: str


class EngineDouble:
    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.failure: Exception | None = None
        self.output_processor = SimpleNamespace(request_states={})

    def asks(self, *names: str) -> None:
        states = {number: SimpleNamespace(lora_name=name) for number, name in enumerate(names)}
        self.output_processor.request_states = states

    async def add_lora(self, request: Request) -> bool:
        if self.failure:
            raise self.failure
        assert (Path(request.lora_path) / "adapter_model.safetensors").exists()
        self.loaded[request.lora_int_id] = request.lora_name
        return True

    async def remove_lora(self, number: int) -> bool:
        del self.loaded[number]
        return True


class Served:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine, self.adapters = EngineDouble(), ServedAdapters()
        self.number = 0
        self.models = SimpleNamespace(lora_requests={}, lora_id_counter=SimpleNamespace(inc=self._next))

    def _next(self, step: int) -> int:
        self.number += step
        return self.number

    def write(self, version: int, name: str = "style") -> str:
        folder = version_folder(self.root, name, version)
        write_version(folder, SPEC, lambda path: path.write_bytes(b"tensors"))
        return str(folder)

    async def serve(self, version: int, name: str = "style") -> None:
        await self.adapters.serve(self.engine, self.models, name, version, self.write(version, name))

    def offered(self) -> dict[str, str]:
        return {name: request.lora_name for name, request in self.models.lora_requests.items()}

    def files(self, name: str = "style") -> set[str]:
        return {path.name for path in (self.root / name).iterdir()}


@pytest.fixture
def served(tmp_path, monkeypatch):
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = Request
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
    return Served(tmp_path)


@pytest.mark.scenario("F51")
async def test_every_version_has_a_name_a_number_and_a_path_of_its_own(served):
    seen = []
    for version in (3, 4, 5):
        await served.serve(version)
        seen.append(served.models.lora_requests["style"])
    for attribute in ("lora_name", "lora_int_id", "lora_path"):
        assert len({getattr(request, attribute) for request in seen}) == 3
    assert served.offered() == {"style": "style-v5", "style-v5": "style-v5", "style-v4": "style-v4"}


async def test_what_nobody_can_ask_for_goes_one_version_later(served):
    for version in (1, 2, 3, 4):
        await served.serve(version)
    assert sorted(served.engine.loaded.values()) == ["style-v2", "style-v3", "style-v4"]
    assert served.files() == {"2", "3", "4"}


async def test_a_version_in_use_stays_however_old_it_is(served):
    await served.serve(1)
    served.engine.asks("style-v1", None)
    for version in (2, 3, 4, 5):
        await served.serve(version)
    assert served.files() == {"1", "3", "4", "5"}
    assert "style-v1" in served.engine.loaded.values()
    served.engine.asks()
    await served.serve(6)
    assert served.files() == {"4", "5", "6"}


async def test_an_adapter_that_cannot_be_loaded_changes_nothing_that_is_offered(served):
    await served.serve(1)
    served.engine.failure = ValueError("rank 99")
    with pytest.raises(ValueError, match="rank 99"):
        await served.serve(2)
    assert served.offered() == {"style": "style-v1", "style-v1": "style-v1"}


async def test_a_version_that_is_served_already_is_not_loaded_again(served):
    await served.serve(1)
    await served.serve(1)
    assert list(served.engine.loaded) == [1]


async def test_what_an_unfinished_refit_left_goes_with_the_next_one(served):
    await served.serve(1)
    served.write(2)
    await served.serve(3)
    assert served.files() == {"1", "3"}


async def test_an_adapter_that_is_withdrawn_can_be_served_again(served):
    await served.serve(1)
    await served.serve(2, "tone")
    served.adapters.withdraw(served.models, ["style"])
    assert served.offered() == {"tone": "tone-v2", "tone-v2": "tone-v2"}
    await served.serve(5)
    assert served.offered()["style"] == "style-v5"
    assert "style-v1" not in served.engine.loaded.values()


async def test_after_a_sleep_every_adapter_is_loaded_anew(served):
    await served.serve(1)
    await served.serve(2, "tone")
    await served.adapters.forget_loaded(served.engine)
    assert served.engine.loaded == {}
    assert "tone" in served.offered()


def test_a_written_version_is_whole_and_private_and_has_what_peft_would_write(tmp_path):
    folder = version_folder(tmp_path, "style", 7)
    assert write_version(folder, SPEC, lambda path: path.write_bytes(b"first"))[0] == 5
    nbytes, sha256 = write_version(folder, SPEC, lambda path: path.write_bytes(b"second"))
    assert (
        (nbytes, sha256) == measure(folder) == (6, "16367aacb67a4a017c8da8ab95682ccb390863780f7114dda0a0e0c55644c7c4")
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (8, 16, "none")
    assert [path.name for path in folder.parent.iterdir()] == ["7"]


def test_the_private_folder_is_unreadable_for_others_and_ends_with_its_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path)
    with private_folder() as folder:
        assert list(folder.iterdir()) == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "style").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_launcher_left_goes_and_what_a_living_one_has_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path)
    left = tmp_path / "rolloutfleet.adapters-dead" / "style"
    left.mkdir(parents=True)
    with private_folder() as first, private_folder() as second:
        assert {first, second} == set(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "rolloutfleet.adapters-link").symlink_to(elsewhere)
    with private_folder():
        assert elsewhere.exists()


def test_a_version_is_written_only_where_the_launcher_has_made_room(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_version(version_folder(tmp_path / "gone", "style", 1), SPEC, lambda path: path.write_bytes(b""))


async def test_the_launcher_has_adapters_served_withdrawn_and_loaded_anew_through_the_middleware(served, monkeypatch):
    monkeypatch.setenv(ENV_ADAPTERS, str(served.root))
    monkeypatch.setenv(ENV_ENGINE_SECRET, "secret")
    monkeypatch.setenv(ENV_ENGINE_NAME, "f-0-0-0")
    middleware = FleetMiddleware(None)
    state = SimpleNamespace(engine_client=served.engine, openai_serving_models=served.models)
    served.engine.wake_up = AsyncMock()

    async def ask(verb: str, **body: object) -> dict:
        sent: list[dict] = []
        scope = {"type": "http", "path": ENGINE_PREFIX + verb, "app": SimpleNamespace(state=state)}
        scope["headers"] = [(SECRET_HEADER.encode(), b"secret")]
        receive = AsyncMock(return_value={"body": json.dumps(body).encode()})
        await middleware(scope, receive, AsyncMock(side_effect=sent.append))
        assert sent[0]["status"] == 200
        return json.loads(sent[1]["body"])

    served.write(1)
    assert (await ask("serve-adapter", name="style", version=1))["pause_seconds"] >= 0
    assert served.offered() == {"style": "style-v1", "style-v1": "style-v1"}
    await ask("wake", tags=["kv_cache"])
    assert list(served.engine.loaded) == [1]
    await ask("wake", tags=["weights"])
    assert served.engine.loaded == {}
    await ask("withdraw-adapters", names=["style"])
    assert served.offered() == {}

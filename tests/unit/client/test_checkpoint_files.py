"""Which files a checkpoint consists of, and what is said of one that cannot be read. Needs no torch."""

from pathlib import Path

import fsspec
import pytest

from fakes.checkpoints import write_file, write_index
from rolloutfleet.sources import CheckpointError, open_checkpoint

A = {"a": ("F32", (2, 2), bytes(16))}
B = {"b": ("BF16", (3,), bytes(6)), "empty": ("F32", (0, 4), b"")}


def names(place: Path | str) -> list[str]:
    return [tensor.name for tensor in open_checkpoint(str(place)).manifest().tensors]


def sharded(folder: Path, **promised: str) -> Path:
    write_file(folder / "model-00001-of-00002.safetensors", A)
    write_file(folder / "model-00002-of-00002.safetensors", B)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    return write_index(folder, {"a": one, "b": two, "empty": two} | promised)


def test_a_file_a_folder_and_an_index_name_the_same_checkpoint(tmp_path: Path) -> None:
    index = sharded(tmp_path / "many")
    single = write_file(tmp_path / "one" / "model.safetensors", A | B)
    assert names(index) == names(index.parent) == ["a", "b", "empty"]
    assert names(single) == names(single.parent) == names(f"file://{single}") == ["a", "b", "empty"]
    spec = open_checkpoint(str(single)).manifest().tensors[1]
    assert (spec.name, spec.dtype, spec.shape) == ("b", "bfloat16", (3,))
    assert open_checkpoint(str(single)).nbytes == 22


def test_files_of_other_names_are_taken_all_together(tmp_path: Path) -> None:
    write_file(tmp_path / "weights-b.safetensors", B)
    write_file(tmp_path / "weights-a.safetensors", A)
    (tmp_path / "config.json").write_text("{}")
    assert names(tmp_path) == ["a", "b", "empty"]


def test_a_checkpoint_is_read_by_ranges_from_a_remote_store(tmp_path: Path) -> None:
    folder = sharded(tmp_path).parent
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe(f"/run/{path.name}", path.read_bytes())
    assert names("memory://run") == ["a", "b", "empty"]
    assert names("memory://run/model-00001-of-00002.safetensors") == ["a"]
    with pytest.raises(CheckpointError, match="there is nothing at memory://elsewhere"):
        names("memory://elsewhere")


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is empty"):
        names(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file: it holds pytorch_model\.bin"):
        names(tmp_path)
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        names(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither a folder nor a"):
        names(tmp_path / "pytorch_model.bin")


def test_a_missing_file_is_named_with_how_many_there_should_be(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"names 1 of 2 files that are not there: model-00002-of-00002\.safetensors"
    ):
        names(index)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the index promises tensor c in .*00001.*, but no file holds it"):
        names(sharded(tmp_path / "more", c="model-00001-of-00002.safetensors"))
    with pytest.raises(CheckpointError, match=r"the index promises tensor b in .*00001.*, but it is in .*00002"):
        names(sharded(tmp_path / "elsewhere", b="model-00001-of-00002.safetensors"))
    sharded(tmp_path / "less")
    index = write_index(
        tmp_path / "less",
        {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )
    with pytest.raises(CheckpointError, match=r"the index does not name empty, which .*00002.* holds"):
        names(index)
    index.write_text('{"weights": 1}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        names(index)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", A)
    write_file(tmp_path / "y.safetensors", A)
    with pytest.raises(CheckpointError, match=r"tensor a is both in .*x\.safetensors and in .*y\.safetensors"):
        names(tmp_path)


def test_a_file_that_was_cut_off_says_where(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor b ends at byte \d+ of .*, which has \d+: the file was cut off"):
        names(write_file(tmp_path / "model.safetensors", A | B, cut=2))
    short = tmp_path / "short.safetensors"
    short.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="has 3 bytes, which is no safetensors file"):
        names(short)
    short.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="it is no safetensors file, or was cut off"):
        names(short)
    short.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CheckpointError, match=r"the header of .* cannot be understood"):
        names(short)


def test_a_dtype_that_cannot_be_sent_is_refused_with_those_that_can(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"q": ("F4", (4,), bytes(2))})
    with pytest.raises(CheckpointError, match=r"tensor q of .* has dtype F4; those that can be sent are BF16, BOOL"):
        names(path)
    path = write_file(tmp_path / "model.safetensors", {"q": ("F32", (4,), bytes(12))})
    with pytest.raises(CheckpointError, match=r"tensor q of .* has 12 bytes; F32 \[4\] takes 16"):
        names(path)


def test_a_missing_driver_is_named_with_its_package() -> None:
    with pytest.raises(CheckpointError, match="needs the package s3fs, which is not installed here"):
        names("s3://bucket/run")
    with pytest.raises(CheckpointError, match="fsspec knows no scheme nowhere"):
        names("nowhere://bucket/run")

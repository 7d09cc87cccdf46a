"""The binding of libnccl against a small C library with NCCL's own signatures, which writes down how it was called."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rolloutfleet.transport.libnccl import UNIQUE_ID_BYTES, Communicator, Library, NcclError, find_library

SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef void* comm;
static char log_[4096];
static int async_ = 0;
const char* recorded(void) { return log_; }
void set_async(int code) { async_ = code; }
#define NOTE(...) snprintf(log_ + strlen(log_), sizeof log_ - strlen(log_), __VA_ARGS__)
const char* ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "internal error"; }
const char* ncclGetLastError(comm c) { return c ? "socket closed by 10.0.0.7" : ""; }
int ncclGetVersion(int* version) { *version = 22803; return 0; }
int ncclGetUniqueId(ncclUniqueId* id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2); return 0; }
int ncclCommInitRank(comm* c, int ranks, ncclUniqueId id, int rank) {
  for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(i * 2)) return 4;
  *c = (comm)(size_t)0x123456789abc;
  NOTE("init %d/%d;", rank, ranks);
  return 0;
}
int ncclCommGetAsyncError(comm c, int* code) { (void)c; *code = async_; return 0; }
int ncclCommAbort(comm c) { NOTE("abort %zx;", (size_t)c); return 0; }
int ncclSend(const void* p, size_t n, int type, int peer, comm c, void* stream) {
  NOTE("send %zx %zu type %d to %d on %zx stream %zx;", (size_t)p, n, type, peer, (size_t)c, (size_t)stream);
  return 0; }
int ncclRecv(void* p, size_t n, int type, int peer, comm c, void* stream) {
  NOTE("receive %zx %zu type %d from %d on %zx stream %zx;", (size_t)p, n, type, peer, (size_t)c, (size_t)stream);
  return peer == 9 ? 6 : 0; }
int ncclBroadcast(const void* s, void* r, size_t n, int type, int root, comm c, void* stream) {
  NOTE("broadcast %zx %zx %zu type %d root %d ", (size_t)s, (size_t)r, n, type, root);
  NOTE("on %zx stream %zx;", (size_t)c, (size_t)stream);
  return 0; }
int ncclGroupStart(void) { NOTE("begin;"); return 0; }
int ncclGroupEnd(void) { NOTE("end;"); return 0; }
"""

BIG = 5 << 32


def compile_library(folder: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    (folder / "nccl.c").write_text(source)
    built = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, folder / "nccl.c"], check=True, timeout=60)
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nccl"), SOURCE)


def recorded(library: Library) -> list[str]:
    import ctypes

    function = ctypes.CDLL(library.path).recorded
    function.restype = ctypes.c_char_p
    return function().decode().split(";")[:-1]


def test_every_call_arrives_with_the_arguments_it_was_given(built: Path) -> None:
    library = Library(str(built))
    assert library.version() == 22803
    identity = library.unique_id()
    assert identity == bytes(i * 2 % 256 for i in range(UNIQUE_ID_BYTES))
    communicator = library.init_rank(identity, 3, 8)
    with library.grouped(communicator):
        library.send(communicator, 0x7F0011223344, BIG, 5, 0x55)
        library.receive(communicator, 0x7F00AABBCCDD, BIG + 1, 6, 0x66)
    library.broadcast(communicator, 0x7F0000000010, 32, 0, 0)
    library.abort(communicator)
    on = "on 123456789abc"
    assert recorded(library) == [
        "init 3/8",
        "begin",
        f"send 7f0011223344 {BIG} type 1 to 5 {on} stream 55",
        f"receive 7f00aabbccdd {BIG + 1} type 1 from 6 {on} stream 66",
        "end",
        f"broadcast 7f0000000010 7f0000000010 32 type 1 root 0 {on} stream 0",
        "abort 123456789abc",
    ]


def test_a_failed_call_is_told_in_the_librarys_own_words(built: Path) -> None:
    library = Library(str(built))
    with pytest.raises(
        NcclError, match=r"ncclRecv failed with NCCL error 6, remote process exited \(socket closed by 10\.0\.0\.7\)"
    ):
        library.receive(Communicator(1), 0, 1, 9, 0)
    with pytest.raises(NcclError, match=r"ncclCommInitRank failed with NCCL error 4, internal error$"):
        library.init_rank(bytes(UNIQUE_ID_BYTES), 0, 2)
    assert issubclass(NcclError, ConnectionError)


def test_what_fails_in_the_background_is_raised_and_what_is_in_progress_is_not(built: Path) -> None:
    import ctypes

    library = Library(str(built))
    for harmless in (0, 7):
        ctypes.CDLL(str(built)).set_async(harmless)
        library.raise_async_error(Communicator(1))
    ctypes.CDLL(str(built)).set_async(6)
    with pytest.raises(NcclError, match="an operation in flight failed with NCCL error 6, remote process exited"):
        library.raise_async_error(Communicator(1))


def test_a_unique_id_of_the_wrong_length_is_refused(built: Path) -> None:
    with pytest.raises(ValueError, match="unique id has 5 bytes; it must have 128"):
        Library(str(built)).init_rank(b"short", 0, 2)


def test_a_library_without_a_function_is_refused_by_name(tmp_path: Path) -> None:
    built = compile_library(tmp_path, SOURCE.replace("ncclCommAbort", "ncclCommAbsent"))
    with pytest.raises(OSError, match="has no function ncclCommAbort"):
        Library(str(built))


def test_the_library_that_the_process_has_loaded_is_found(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f1-7f2 r-xp 00000000 08:01 5 /usr/lib/libc.so.6\n7f3-7f4 r-xp 00000000 08:01 6 /opt/env one/nvidia/nccl/lib/libnccl.so.2\n"
    )
    assert find_library(maps) == "/opt/env one/nvidia/nccl/lib/libnccl.so.2"
    maps.write_text("7f1-7f2 r-xp 00000000 08:01 5 /usr/lib/libc.so.6\n")
    assert find_library(maps).endswith("libnccl.so.2")

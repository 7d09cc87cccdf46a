"""What the launcher knows of the machine: processes, ports, mounts, cgroups, packages."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from localcluster import processes
from localcluster.cgroups import parse_hierarchies
from localcluster.errors import LauncherError
from localcluster.mounts import mounts_below, parse_mount_points
from localcluster.nodes import may_lower_oom_score
from localcluster.packages import NODES, missing_packages
from localcluster.paths import Paths
from localcluster.ports import listeners, parse_listeners, require_free
from localcluster.processes import Identity, Record, identify, is_alive, marked, parse_stat, read_record, write_record
from localcluster.state import builder, no_builder, sole_launcher


@contextmanager
def child(code: str) -> Iterator[Identity]:
    """A Python process that has printed a line and waits for its standard input to close."""
    argv = [sys.executable, "-c", f"import signal, sys; {code}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        identity = identify(process.pid)
        assert identity is not None
        yield identity


def test_stat_is_read_whatever_the_commands_name_contains() -> None:
    fields = " ".join(["S", "1", *["0"] * 17, "4242", "0"])
    assert parse_stat(f"77 (a) R (b c) {fields}\n") == ("S", 4242)


def test_a_process_is_itself_and_a_recycled_pid_is_not() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert is_alive(own)
    assert not is_alive(replace(own, start_ticks=own.start_ticks - 1))
    assert not is_alive(replace(own, boot="another boot"))


def test_stop_ends_the_recorded_process_and_spares_one_that_only_has_its_pid() -> None:
    with child("pass") as own:
        processes.stop([replace(own, start_ticks=own.start_ticks + 1)])
        assert is_alive(own)
        processes.stop([own])
        assert not is_alive(own)


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with child("signal.signal(signal.SIGTERM, signal.SIG_IGN)") as own:
        processes.stop([own], seconds=0.1)
        assert not is_alive(own)


def test_a_started_daemon_is_recorded_marked_and_found_without_its_record(tmp_path: Path) -> None:
    state = tmp_path / "state"
    log, run = tmp_path / "daemon.log", tmp_path / "run"
    record = processes.start(
        "daemon", ["sleep", "60"], state=state, log=log, run=run, digest="d", env={"PATH": os.environ["PATH"]}
    )
    try:
        assert read_record(run, "daemon") == record
        deadline = time.monotonic() + 5
        while record.identity not in marked(state) and time.monotonic() < deadline:
            pass
        assert marked(state) == [record.identity]
        assert marked(tmp_path / "other") == []
    finally:
        processes.stop([record.identity])
    assert marked(state) == []


def test_a_broken_record_is_no_record(tmp_path: Path) -> None:
    write_record(tmp_path, Record("etcd", Identity(1, 2, "b"), "d", 3.0))
    assert read_record(tmp_path, "etcd") == Record("etcd", Identity(1, 2, "b"), "d", 3.0)
    processes.record_path(tmp_path, "etcd").write_text('{"name": "etc')
    assert read_record(tmp_path, "etcd") is None
    assert read_record(tmp_path, "absent") is None


def test_listeners_are_read_from_both_tables() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = "   0: {} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0 0 10 0\n"
    table = head + line.format("0100007F:192B", "0A", 111) + line.format("0100580A:192B", "01", 222)
    assert parse_listeners(table) == {("127.0.0.1", 6443): 111}
    six = head + line.format("00000000000000000000000000000000:0050", "0A", 333)
    assert parse_listeners(six) == {("::", 80): 333}


def test_a_taken_port_is_refused_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ("127.0.0.1", port) in listeners()
        with pytest.raises(
            LauncherError, match=rf"port {port} on 127.0.0.1, wanted by etcd, is held by pid {os.getpid()} "
        ):
            require_free([("etcd", "127.0.0.1", port)])
    require_free([("etcd", "127.0.0.1", port)])


def test_a_port_taken_on_every_address_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, pytest.raises(LauncherError, match=r"on 0\.0\.0\.0"):
        require_free([("etcd", "127.0.0.1", server.getsockname()[1])])


def test_mount_points_are_unescaped_and_matched_by_whole_names() -> None:
    text = "1 0 8:1 / /a\\040b rw - ext4 /dev/vda rw\n2 0 8:1 / /x rw - ext4 /dev/vda rw\n"
    assert parse_mount_points(text) == ["/a b", "/x"]
    assert "/proc" in mounts_below([Path("/proc")])
    assert mounts_below([Path("/pro")]) == []


def test_cgroup_hierarchies_of_both_versions_are_found_once() -> None:
    line = "30 24 0:26 / {} rw,nosuid shared:9 - {} cgroup rw\n"
    text = line.format("/sys/fs/cgroup/cpu", "cgroup") * 2 + line.format("/sys/fs/cgroup/unified", "cgroup2")
    text += "31 24 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    assert parse_hierarchies(text) == [(Path("/sys/fs/cgroup/cpu"), False), (Path("/sys/fs/cgroup/unified"), True)]


@pytest.mark.parametrize(
    ("mask", "may"), [("000001fffeffffff", False), ("000001ffffffffff", True), ("0000000000000000", False)]
)
def test_the_right_to_lower_oom_scores_is_read_from_the_capabilities(mask: str, may: bool) -> None:
    assert may_lower_oom_score(f"Name:\tx\nCapEff:\t{mask}\n") is may


def test_missing_programs_name_their_packages_once() -> None:
    assert missing_packages(NODES, lambda tool: None if tool in ("containerd", "ctr", "nft") else f"/bin/{tool}") == [
        "containerd",
        "nftables",
    ]


def test_two_launchers_do_not_change_one_cluster_at_once(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "cache", tmp_path / "state", tmp_path)
    with sole_launcher(paths), pytest.raises(LauncherError, match=rf"pid {os.getpid()}"), sole_launcher(paths):
        pytest.fail("the second launcher got in")
    with builder(paths), builder(paths), pytest.raises(LauncherError, match="at work"), no_builder(paths):
        pytest.fail("down got in while images were built")
    with sole_launcher(paths), no_builder(paths):
        pass

"""What a second copy of a rank's weights takes, and what the machine and the container leave for it."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout import Block, Parameter, Placement, build_layout
from rolloutfleet_worker.rank.room import buffer_starts, free_in_host_memory

GB = 1 << 30


class Machine:
    """The files by which a kernel tells of memory, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: {64 * GB >> 10} kB\nHugePages_Total: 0\nMemAvailable: {50 * GB >> 10} kB\n"
        )
        self.write("proc/self/cgroup", "0::/\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def group(self, folder: str, limit: int | str, used: int, inactive: int = 0) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\n")

    def old_group(self, folder: str, limit: int, used: int, inactive: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_the_machine_s_memory_counts(machine: Machine) -> None:
    assert free_in_host_memory(machine.root) == 50 * GB
    machine.group("sys/fs/cgroup", "max", 9 * GB)
    assert free_in_host_memory(machine.root) == 50 * GB


def test_a_container_s_limit_counts_without_the_pages_that_the_kernel_gives_back(machine: Machine) -> None:
    machine.group("sys/fs/cgroup", 20 * GB, 17 * GB)
    assert free_in_host_memory(machine.root) == 3 * GB
    machine.group("sys/fs/cgroup", 20 * GB, 17 * GB, inactive=4 * GB)
    assert free_in_host_memory(machine.root) == 7 * GB
    machine.group("sys/fs/cgroup", 20 * GB, 21 * GB)
    assert free_in_host_memory(machine.root) == 0


def test_the_narrowest_group_around_the_process_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kubepods/pod7/engine\n")
    machine.group("sys/fs/cgroup/kubepods/pod7/engine", "max", GB)
    machine.group("sys/fs/cgroup/kubepods/pod7", 12 * GB, 8 * GB)
    machine.group("sys/fs/cgroup/kubepods", 60 * GB, 30 * GB)
    assert free_in_host_memory(machine.root) == 4 * GB


@pytest.mark.parametrize("seen", ["kubepods/pod7", ""], ids=["the host's path", "the container's own"])
def test_the_older_control_groups_are_understood(machine: Machine, seen: str) -> None:
    machine.write("proc/self/cgroup", "11:cpu,cpuacct:/elsewhere\n9:memory:/kubepods/pod7\n1:name=systemd:/x\n0::/\n")
    machine.old_group(f"sys/fs/cgroup/memory/{seen}", 10 * GB, 8 * GB, inactive=GB)
    assert free_in_host_memory(machine.root) == 3 * GB


def test_the_older_control_groups_word_for_no_limit_is_a_large_number(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:memory:/\n")
    machine.old_group("sys/fs/cgroup/memory", 9223372036854771712, 8 * GB)
    assert free_in_host_memory(machine.root) == 50 * GB


def test_this_machine_tells() -> None:
    assert free_in_host_memory() > 0


def test_a_second_buffer_has_whole_parameters_aligned_whatever_is_placed_of_them() -> None:
    manifest = Manifest(
        tensors=(TensorSpec(name="w", dtype="float32", shape=(3,)), TensorSpec(name="x", dtype="int8", shape=(5,)))
    )
    parameters = (Parameter("padded", "float32", 100), Parameter("other", "float32", 1))
    placed = Placement(0, Block.contiguous(0, 3), 0, Block.contiguous(0, 3))
    layout = build_layout(manifest, parameters, [placed], {1: "x goes through the loader"}, "shape")
    assert buffer_starts(layout) == ({"padded": 0, "other": 512}, 768)
    assert layout.placed_bytes == 12

"""What a launcher says of a container that its fabric's adapters do not reach."""

import os
import resource

import pytest

from rolloutfleet_worker.settings import SettingsError, read_settings
from rolloutfleet_worker.verbs_devices import describe_lock_limit, find_verbs_fault

NONE, LOCK = "CapPrm:\t0\nCapEff:\t0000000000000000\n", "CapEff:\t0000000000004000\n"


def test_without_a_fabric_nothing_is_looked_for(tmp_path):
    assert find_verbs_fault({}, tmp_path / "none") == ""


def test_a_container_without_a_device_is_refused_before_a_model_is_loaded(tmp_path):
    environment = {"ROLLOUTFLEET_FABRIC": "RoCE", "ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "none")}
    with pytest.raises(SettingsError) as refused:
        read_settings(environment, devices=tmp_path)
    assert f"fabric.preset is RoCE, but this container has no device {tmp_path}/uverbs*" in str(refused.value)


def test_a_device_that_opens_is_enough(tmp_path):
    (tmp_path / "uverbs0").touch()
    assert find_verbs_fault({"ROLLOUTFLEET_FABRIC": "InfiniBand"}, tmp_path) == ""


def test_devices_that_are_not_ours_are_named_with_the_user(tmp_path, monkeypatch):
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = find_verbs_fault({"ROLLOUTFLEET_FABRIC": "InfiniBand"}, tmp_path)
    assert told == f"fabric.preset is InfiniBand, but user {os.geteuid()} may not open {tmp_path}/uverbs0"


@pytest.mark.parametrize(("limit", "status"), [(resource.RLIM_INFINITY, NONE), (65536, LOCK)])
def test_memory_that_may_be_locked_without_bound_is_no_reason_for_a_warning(limit, status):
    assert describe_lock_limit(limit, status) == ""


def test_a_bound_is_told_with_what_to_do():
    told = describe_lock_limit(64 * 2**20, NONE)
    assert told.startswith("this process may lock 64 MiB of memory")
    assert "LimitMEMLOCK=infinity" in told

"""A rank's process does not outlive its launcher, whatever it was about to say."""

import os
import socket
import threading

import pytest

from fakes.pod import RankDouble
from rolloutfleet_worker.rank.link import RankLink
from rolloutfleet_worker.wire import encode


@pytest.mark.scenario("F67")
@pytest.mark.parametrize("doing", ["nothing", "answering"])
def test_the_process_ends_with_its_launcher_whatever_it_was_doing(tmp_path, monkeypatch, doing):
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "ranks.sock"))
    server.listen()
    rank = RankDouble(0)
    link = RankLink(str(tmp_path / "ranks.sock"), rank)
    link.start()
    launcher, _ = server.accept()
    if doing == "answering":
        # The launcher is killed while the rank carries out an abort: its answer meets a socket that is closed.
        rank.abort = launcher.close
        launcher.sendall(encode({"id": 1, "op": "abort", "body": {}}))
    else:
        launcher.close()
    assert ended.wait(5)
    assert codes == [70]
    link.stop()
    server.close()

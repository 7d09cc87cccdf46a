"""An engine pod of pretended ranks for every test that asks for one."""

import pytest

from fakes.pod import running_pod


@pytest.fixture
async def pod(tmp_path):
    async with running_pod(tmp_path) as pod:
        yield pod

"""One Slurm for all tests here, and a small run to submit to it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import CannotStartError, Cluster
from slurm.site import Site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("slurm")
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """The running Slurm; where it cannot be started the test is skipped, in CI it fails."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        try:
            cluster = Cluster.start(Path(folder))
        except CannotStartError as error:
            if "CI" in os.environ:
                raise
            pytest.skip(f"no Slurm here: {error}")
        try:
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    """A user's directory on the cluster. A job that is left, of a test that failed, takes no other test's nodes."""
    site = Site.make(slurm, tmp_path)
    yield site
    site.cancel()

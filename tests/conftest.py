"""What every test shares."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import tests.forks
import tests.small_states  # for what it sets
from tests import breaking_off
from tests.forks import forks, pytest_configure_node
from tests.parsing import parse_in_turns
from tests.servers.gluster import gluster
from tests.shared_memory import name
from tiercheck.integrations import hooks

__all__ = ["forks", "gluster", "name", "pytest_configure_node"]

LONGEST_FIRST = (
    "tests/cluster/demo/test_demo.py",
    "tests/simulation/test_policies_under_failures.py",
    "tests/cluster/deepspeed/test_provider.py",
    "tests/cluster/tiers/test_fsspec_conformance.py",
    "tests/plugins/test_plugins.py",
    "tests/simulation/test_whole_lives.py",
    "tests/cluster/test_pages.py",
    "tests/cluster/layouts/test_parallel.py",
    "tests/cluster/agents/test_training.py",
    "tests/cluster/deepspeed/test_lost_stage.py",
    "tests/cluster/figures/test_tier_figures.py",
    "tests/cluster/agents/test_kills.py",
    "tests/unit/test_checkpointer.py",
    "tests/simulation/test_node_memory.py",
    "tests/cluster/figures/test_job_figures.py",
    "tests/plugins/test_transformers.py",
    "tests/cluster/tiers/test_soak.py",
    "tests/cluster/s3/test_kills.py",
    "tests/cluster/s3/test_faults.py",
    "tests/cluster/tiers/test_lustre_two_mounts.py",
    "tests/cluster/folds/test_auto.py",
    "tests/simulation/test_old_views.py",
    "tests/unit/integrations/test_replicas.py",
    "tests/cluster/layouts/test_relayout.py",
    "tests/simulation/test_kills_in_a_life.py",
    "tests/cluster/tiers/test_fsspec_failures.py",
    "tests/unit/test_kill_everywhere.py",
    "tests/cluster/s3/test_conformance.py",
    "tests/simulation/test_user_policies.py",
    "tests/cluster/folds/test_kills.py",
    "tests/cluster/test_export_memory.py",
    "tests/cluster/folds/test_process.py",
    "tests/cluster/torch/test_fsdp.py",
    "tests/cluster/s3/test_stateful.py",
    "tests/cluster/torch/test_ddp_compressed.py",
    "tests/unit/opening/test_held.py",
    "tests/unit/opening/test_attach.py",
    "tests/cluster/agents/test_node_memory.py",
    "tests/unit/recovery/reading/test_reader.py",
    "tests/cluster/s3/test_memory.py",
    "tests/unit/archive/test_changeable.py",
    "tests/conformance/test_lustre_conformance.py",
    "tests/plugins/test_own_policy.py",
    "tests/cluster/agents/test_neighbours.py",
    "tests/unit/kernels/cuda/test_arithmetic.py",
    "tests/cluster/demo/test_trainers.py",
    "tests/conformance/test_kit.py",
    "tests/property/test_container_properties.py",
    "tests/cluster/tiers/test_peer_failures.py",
    "tests/cluster/agents/test_attach.py",
    "tests/simulation/test_read_errors_and_damage.py",
    "tests/unit/archive/change/test_copying.py",
    "tests/unit/recovery/finding/test_past.py",
    "tests/unit/benchmarks/test_checkfree.py",
    "tests/simulation/test_elastic_lives.py",
    "tests/simulation/test_lost_stages.py",
    "tests/unit/test_frozen_weights.py",
)
"""The files that take longest. They begin first, so that no worker is left with one when the others are done.
The tests of ``make cluster`` mostly wait. In ``make test`` they and the others take turns: there is always something
to compute."""

CLUSTER = ("tests/cluster/", "tests/plugins/")
"""Where the Makefile looks for the tests of ``make cluster``, which then need not load all the others."""

# What is collected stays: looking through it for garbage, again and again, is a quarter of the time of a collection.
gc.disable()

# Two cores, several processes: threads that spin for one another cost more than they bring.
torch.set_num_threads(1)

parse_in_turns()

# No example is timed, on however busy a machine, and one that fails prints what replays it.
settings.register_profile("tiercheck", deadline=None, print_blob=True)
settings.load_profile("tiercheck")


def pytest_configure(config: pytest.Config) -> None:
    breaking_off.listen(config)
    tests.forks.serve_workers(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cluster") and not item.nodeid.startswith(CLUSTER):
            raise pytest.UsageError(f"{item.nodeid} is marked cluster: make cluster looks for it in {CLUSTER} alone")
    places = {file: place for place, file in enumerate(LONGEST_FIRST)}
    files = dict.fromkeys(map(file_of, items))
    turns: dict[str, float] = {}
    for kind in (True, False):
        group = sorted(
            (file for file in files if file.startswith(CLUSTER) is kind), key=lambda file: places.get(file, len(places))
        )
        turns |= {file: turn / len(group) for turn, file in enumerate(group)}
    items.sort(key=lambda item: turns[file_of(item)])


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it again and again, nor through what is
    imported and compiled later."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_attached() -> Iterator[None]:
    """A test that fails leaves no checkpointer to the next one."""
    yield
    for checkpointer in hooks.attached():
        checkpointer.abort()

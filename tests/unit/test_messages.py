"""What people get wrong, and the one line each of them is told."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from tests.jobs import Job
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    JobConflict,
    Mismatch,
    RecoveryError,
    UnsupportedSetup,
)
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.types import bytes_text


@pytest.fixture
def memory() -> str:
    return f"memory://messages-{uuid.uuid4().hex}"


def test_a_url_instead_of_a_hierarchy() -> None:
    job = Job()
    with pytest.raises(ConfigurationError, match=r"must be a Hierarchy, such as Hierarchy.of\('shm://x'\)"):
        attach(job.model, job.optimizer, "shm://x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"such as Hierarchy.of\('shm://x', 'nvme:///x'\)"):
        attach(job.model, job.optimizer, ["shm://x", "nvme:///x"])  # type: ignore[arg-type]


def test_values_of_the_wrong_type() -> None:
    with pytest.raises(ConfigurationError, match="base_every must be int, not '5'"):
        CheckpointConfig(base_every="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="batch must be int, not True"):
        CheckpointConfig(batch=True)


def test_one_place_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="two tiers are the same place"):
        Job().attach(Hierarchy.of("memory://", f"nvme://{tmp_path}/a", f"nvme://{tmp_path}/a"))


def test_attaching_twice(tmp_path: Path, memory: str) -> None:
    job = Job()
    job.attach(Hierarchy.of(memory, f"nvme://{tmp_path}/a"))
    with pytest.raises(UnsupportedSetup, match=r"attached in this process already, .* close it first"):
        Job().attach(Hierarchy.of("memory://", f"nvme://{tmp_path}/b"))
    (refused,) = on_all_ranks(1, lambda _: Job().attach(Hierarchy.of("memory://", f"nvme://{tmp_path}/a")))
    with pytest.raises(JobConflict, match=r"this process is using nvme://.* already: close the checkpointer"):
        raise refused
    job.checkpointer.abort()


@pytest.mark.parametrize("path", ["/proc/tiercheck", f"{__file__}/below"])
def test_a_directory_that_cannot_be_made(path: str) -> None:
    with pytest.raises(RecoveryError, match=rf"tier nvme: the directory {path} cannot be made"):
        Job().attach(Hierarchy.of("memory://", f"nvme://{path}"))


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecoveryError, match=r"file cannot be made: (File exists|Not a directory)"):
        Job().attach(Hierarchy.of("memory://", f"nvme://{tmp_path}/file"))


def test_torchrun_without_init_process_group(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 2, but .* call torch.distributed.init_process_group"):
        Job().attach(Hierarchy.of(memory))


def test_another_model_is_told_by_its_first_difference(memory: str) -> None:
    job = Job()
    job.attach(Hierarchy.of(memory))
    job.train(2)
    job.checkpointer.abort()
    with pytest.raises(Mismatch, match=r"0.weight was \(16, 8\), and is \(17, 8\) here"):
        Job(width=17).attach(Hierarchy.of(memory))


def test_too_little_memory_is_told_in_units_that_fit() -> None:
    with pytest.raises(CapacityExceeded, match=r"has room for 10.0 KiB"):
        Job().attach(Hierarchy.of("memory://?size=10KiB"))
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]


def test_an_optimizer_of_another_model(memory: str) -> None:
    job = Job()
    with pytest.raises(ConfigurationError, match="are not updated by the attached optimizer"):
        attach(torch.nn.Linear(2, 2), job.optimizer, Hierarchy.of(memory))


def test_a_job_that_went_on_after_failed_saves_ends_well(tmp_path: Path, memory: str) -> None:
    """``warn``: a durable tier that takes nothing neither stops the training nor fails the job at its end."""
    full = FaultPlan.full(after_puts=1)
    durable = Tier(f"nvme://{tmp_path}/a?survives=rack", wrap=lambda driver: FaultyDriver(driver, full))
    job = Job()
    with job.attach(Hierarchy.of(memory, durable), on_save_error="warn", deadline_s=1.0):
        job.train(25)
        assert job.checkpointer.stats.drain_stall_s < 10 * 1.0
    assert job.checkpointer.version == 25

"""The front door, over real tiers: what is resumed is what was, and what cannot be is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import Job, adamw, hierarchy, name, uninterrupted
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    JobConflict,
    Mismatch,
    RecoveryError,
    SaveError,
    UnsupportedSetup,
)
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.shm.namespaces import remove_namespace
from tiercheck.types import Fidelity

__all__ = ["hierarchy", "name"]

LAST = 11
FAILED_AT = 7


def interrupted(hierarchy: Hierarchy, **options: Any) -> Job:
    """Trains to FAILED_AT and is gone, as after ``kill -9``: nothing was flushed."""
    job = Job(**options)
    job.attach(hierarchy)
    job.train(FAILED_AT)
    assert job.checkpointer is not None
    job.checkpointer.abort()
    return job


def resumed(hierarchy: Hierarchy, **options: Any) -> Job:
    job = Job(**options)
    job.attach(hierarchy)
    job.train(LAST)
    return job


OPTIMIZERS = {
    "adamw": adamw,
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


@pytest.mark.parametrize(
    ("optimizer", "scheduled"), [*((name, False) for name in OPTIMIZERS), ("adamw", True), ("sgd", True)]
)
def test_the_resumed_run_is_the_uninterrupted_one(hierarchy: Hierarchy, optimizer: str, scheduled: bool) -> None:
    options = {"optimizer_factory": OPTIMIZERS[optimizer], "scheduled": scheduled}
    reference = uninterrupted(LAST, **options)
    before = interrupted(hierarchy, **options)
    after = resumed(hierarchy, **options)
    recovery = after.checkpointer.recovery
    assert (recovery.version, recovery.point.anchor, recovery.fidelity) == (FAILED_AT, 4, Fidelity.EXACT)
    assert {tier for _, tier in recovery.sources} == {"shm"}
    assert {**before.losses, **after.losses} == reference.losses
    assert after.state() == reference.state()
    after.checkpointer.close()


def test_saving_changes_nothing(hierarchy: Hierarchy) -> None:
    job = Job()
    job.attach(hierarchy)
    job.train(LAST)
    job.checkpointer.close()
    assert job.losses == uninterrupted(LAST).losses


def test_the_durable_tier_alone_is_enough(hierarchy: Hierarchy, name: str) -> None:
    job = Job()
    with job.attach(hierarchy):
        job.train(FAILED_AT)
    remove_namespace(name)
    after = resumed(hierarchy)
    assert after.checkpointer.recovery.version == FAILED_AT
    assert {tier for _, tier in after.checkpointer.recovery.sources} == {"nvme"}
    assert after.state() == uninterrupted(LAST).state()
    after.checkpointer.close()


def test_several_failures_in_a_row(hierarchy: Hierarchy) -> None:
    losses: dict[int, str] = {}
    for last in (1, 2, 5, 5, 6, 10, LAST):
        job = Job()
        job.attach(hierarchy)
        job.train(last)
        losses |= job.losses
        job.checkpointer.abort()
    assert losses == uninterrupted(LAST).losses
    assert job.checkpointer.generation == 7


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
    elif how == "truncate":
        del content[len(content) // 2 :]
    elif how == "header":
        content[20] ^= 1
    # In place: the driver's own temporary files play no part in a disk's decay.
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flip", "truncate", "header"])
def test_a_damaged_base_is_read_from_the_next_tier(hierarchy: Hierarchy, name: str, how: str) -> None:
    job = Job()
    with job.attach(hierarchy):
        job.train(FAILED_AT)
    (base,) = Path(f"/dev/shm/tiercheck-{os.getuid()}-{name}").glob("r*/g*/base/000000000004.safetensors")
    damage(base, how)
    after = resumed(hierarchy)
    recovery = after.checkpointer.recovery
    assert recovery.version == FAILED_AT
    ((key, tier, reason),) = recovery.quarantined
    assert (Path(key).name, tier) == ("000000000004.safetensors", "shm")
    assert str(key) in reason
    assert dict(recovery.sources)[key] == "nvme"
    assert after.state() == uninterrupted(LAST).state()
    after.checkpointer.close()


def test_a_damaged_differential_that_exists_once_moves_the_point_back(hierarchy: Hierarchy, name: str) -> None:
    interrupted(hierarchy)
    root = Path(f"/dev/shm/tiercheck-{os.getuid()}-{name}")
    (record,) = root.glob("r*/g*/differential/000000000007-000000000007.safetensors")
    damage(record, "flip")
    after = resumed(hierarchy)
    assert after.checkpointer.recovery.version == 6
    assert len(after.checkpointer.recovery.quarantined) == 1
    assert after.state() == uninterrupted(LAST).state()
    after.checkpointer.close()


def test_nothing_readable_is_refused_instead_of_beginning_again(
    hierarchy: Hierarchy, name: str, tmp_path: Path
) -> None:
    interrupted(hierarchy)
    for root in (Path(f"/dev/shm/tiercheck-{os.getuid()}-{name}"), tmp_path / "durable"):
        for base in root.glob("r*/g*/base/*.safetensors"):
            damage(base, "truncate")
    with pytest.raises(RecoveryError, match=r"versions up to 7 were saved, but there is no base"):
        Job().attach(hierarchy)


def test_another_model_is_refused_and_nothing_is_touched(hierarchy: Hierarchy) -> None:
    interrupted(hierarchy)
    other = Job(width=17)
    before = other.state()
    with pytest.raises(Mismatch, match=r"is of another model: .* against"):
        other.attach(hierarchy)
    assert other.state()["tensors"] == before["tensors"]
    assert resumed(hierarchy).checkpointer.recovery.version == FAILED_AT


def test_another_optimizer_is_refused(hierarchy: Hierarchy) -> None:
    interrupted(hierarchy)
    with pytest.raises(Mismatch, match=r"AdamW, this job has .*SGD"):
        Job(optimizer_factory=OPTIMIZERS["sgd"]).attach(hierarchy)


def test_two_jobs_under_one_name(hierarchy: Hierarchy, name: str) -> None:
    hold = "from tiercheck.runtime.process_lock import ProcessLock; "
    hold += f"lock = ProcessLock(['shm://{name}'], 0); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            JobConflict, match=rf"another job on this node \(process {other.pid}\) is using shm://{name}"
        ):
            Job().attach(hierarchy)
        other.kill()
    first = Job()
    first.attach(hierarchy)
    first.train(3)
    first.checkpointer.close()
    second = Job()
    second.attach(hierarchy).close()
    assert second.checkpointer.version == 3


def test_a_superseded_job_stops_saving(hierarchy: Hierarchy, tmp_path: Path) -> None:
    """On another node there is no claim to see: there the newer generation in the shared tier decides."""
    durable = hierarchy.tiers[1]
    old = Job()
    old.attach(Hierarchy.of(hierarchy.tiers[0], durable))
    old.train(2)
    elsewhere = Tier(f"memory://elsewhere-{uuid.uuid4().hex}")
    old.checkpointer._job.resources.process_lock.release()
    new = Job()
    (attached,) = on_all_ranks(1, lambda _: new.attach(Hierarchy.of(elsewhere, durable)))  # in a thread, as a process
    assert attached.generation == 2
    with pytest.raises(JobConflict, match="generation 2 of this job has opened: generation 1 saves nothing more"):
        old.train(500)
    new.train(3)
    new.checkpointer.close()
    old.checkpointer.abort()


def test_a_tier_that_cannot_survive_what_is_asked() -> None:
    job = Job()
    with pytest.raises(ConfigurationError, match="no tier survives a rack failure"):
        job.attach(Hierarchy.of("memory://", must_survive="rack"))


def test_a_first_tier_without_memory_to_hand_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="begin the hierarchy with a mappable tier"):
        Job().attach(Hierarchy.of(f"nvme://{tmp_path}/only"))


def test_too_little_shared_memory_is_an_error_at_start(name: str) -> None:
    with pytest.raises(CapacityExceeded, match=r"must hold 3 bases .* lower base_every"):
        Job().attach(Hierarchy.of(f"shm://{name}?size=400KiB"), bases="capture")


@pytest.mark.parametrize("url", ["shn://x", "nowhere", "shm://x?sise=1GiB"])
def test_a_wrong_url_is_one_clear_error(url: str) -> None:
    with pytest.raises(ConfigurationError):
        Job().attach(Hierarchy.of(url))


def test_an_unknown_codec_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="there is no codec 'zip'"):
        Job().attach(Hierarchy.of("memory://"), codec="zip")


def test_a_full_durable_tier_is_reported_and_training_waits_for_it(name: str, tmp_path: Path) -> None:
    full = FaultPlan.full(after_puts=1)  # the generation's record, then nothing more
    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=lambda driver: FaultyDriver(driver, full))
    job = Job()
    job.attach(Hierarchy.of(f"shm://{name}?size=64MiB", durable), bases="capture", deadline_s=2.0)
    with pytest.raises(SaveError, match=r"bases have not reached the durable tier within 2 s \(nvme: .*full"):
        job.train(20)
    job.checkpointer.abort()
    after = Job()
    tiers = Hierarchy.of(f"shm://{name}?size=64MiB", f"nvme://{tmp_path}/durable?survives=rack")
    after.attach(tiers, bases="capture")
    assert after.checkpointer.version >= 8, "what was captured is still in memory"
    after.train(20)
    assert after.state() == uninterrupted(20).state()
    after.checkpointer.close()


def test_a_full_first_tier_raises_or_is_survived_as_the_user_chose(name: str) -> None:
    failing = FaultPlan.fail_call("reserve", lambda: CapacityExceeded("no room"), nth=3, times=2)
    tier = Tier(f"shm://{name}?size=64MiB", wrap=lambda driver: FaultyDriver(driver, failing))
    job = Job()
    job.attach(Hierarchy.of(tier), bases="capture")
    with pytest.raises(SaveError, match=r"version 3 could not be saved: no room"):
        job.train(LAST)
    job.checkpointer.abort()
    remove_namespace(name)

    failing = FaultPlan.fail_call("reserve", lambda: CapacityExceeded("no room"), nth=3, times=2)
    job = Job()
    tiers = Hierarchy.of(Tier(tier.url, wrap=lambda driver: FaultyDriver(driver, failing)))
    job.attach(tiers, bases="capture", on_save_error="warn")
    job.train(FAILED_AT)
    assert job.checkpointer.stats.failed_saves == 1
    job.checkpointer.abort()
    after = Job()
    after.attach(Hierarchy.of(f"shm://{name}?size=64MiB"), bases="capture")
    assert after.checkpointer.version == FAILED_AT, "a base closed the gap"
    after.train(LAST)
    assert after.state() == uninterrupted(LAST).state()
    after.checkpointer.close()


def test_parameters_added_after_attach_are_refused(hierarchy: Hierarchy) -> None:
    job = Job()
    job.attach(hierarchy)
    job.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UnsupportedSetup, match="have changed since attach"):
        job.train(1)
    job.checkpointer.abort()


def test_a_sparse_gradient_is_refused(hierarchy: Hierarchy) -> None:
    model = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = attach(model, optimizer, hierarchy)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedSetup, match="dense gradients"):
        optimizer.step()
    checkpointer.abort()


def test_state_that_cannot_be_saved_is_refused_at_attach(hierarchy: Hierarchy) -> None:
    job = Job()
    with pytest.raises(UnsupportedSetup, match="no state_dict"):
        attach(job.model, job.optimizer, hierarchy, stateful={"loader": object()})

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"f": [lambda: 0]}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(UnsupportedSetup, match=r"f.*\[0\]"):
        attach(job.model, job.optimizer, hierarchy, stateful={"loader": Odd()})


def test_a_parameter_without_a_gradient_is_left_out_of_the_replay(hierarchy: Hierarchy) -> None:
    def train(model: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for version in range(first, last):
            optimizer.zero_grad(set_to_none=True)
            model[version % 2](torch.full((1, 4), float(version))).sum().backward()
            optimizer.step()

    def make() -> tuple[torch.nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = make()
    train(model, optimizer, 0, 9)
    expected = [tensor.tolist() for tensor in model.state_dict().values()]
    model, optimizer = make()
    checkpointer = attach(model, optimizer, hierarchy, config=CheckpointConfig(base_every=5, batch=2))
    train(model, optimizer, 0, 8)
    checkpointer.abort()
    model, optimizer = make()
    checkpointer = attach(model, optimizer, hierarchy, config=CheckpointConfig(base_every=5, batch=2))
    train(model, optimizer, checkpointer.version, 9)
    assert [tensor.tolist() for tensor in model.state_dict().values()] == expected
    checkpointer.abort()


def test_the_approximate_codec_is_never_called_exact(name: str) -> None:
    tiers = Hierarchy.of(f"shm://{name}?size=64MiB")
    job = Job(width=512)
    job.attach(tiers, codec="adaptive", bases="capture")
    job.train(FAILED_AT)
    job.checkpointer.abort()
    job = Job(width=512)
    job.attach(tiers, codec="adaptive", bases="capture")
    recovery = job.checkpointer.recovery
    assert recovery.fidelity is Fidelity.APPROXIMATE
    assert "approximate" in recovery.notes[0]
    job.checkpointer.abort()


def test_versions_are_consecutive(hierarchy: Hierarchy) -> None:
    job = Job()
    checkpointer = job.attach(hierarchy)
    with pytest.raises(ValueError, match="version 3 cannot follow version 0"):
        checkpointer.capture(3, {})
    checkpointer.abort()


def test_a_skipped_iteration_counts_and_changes_nothing(hierarchy: Hierarchy) -> None:
    job = Job()
    checkpointer = job.attach(hierarchy)
    job.train(2)
    expected = job.state()["tensors"]
    checkpointer.skip(3)
    checkpointer.abort()
    job = Job()
    job.attach(hierarchy)
    assert job.checkpointer.version == 3
    assert job.state()["tensors"] == expected
    job.checkpointer.abort()


def test_closed_means_closed(hierarchy: Hierarchy) -> None:
    job = Job()
    checkpointer = job.attach(hierarchy)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(SaveError, match="closed"):
        checkpointer.capture(1, {})
    job.train(1)  # the hooks are gone


def test_a_forked_process_saves_nothing_and_ends_nothing(hierarchy: Hierarchy) -> None:
    job = Job()
    checkpointer = job.attach(hierarchy)
    job.train(FAILED_AT - 2)
    if not (child := os.fork()):
        code = 1
        try:
            with checkpointer:
                for call in (lambda: job.train(FAILED_AT), checkpointer.end_iteration, checkpointer.flush):
                    with pytest.raises(UnsupportedSetup, match="was forked from process"):
                        call()
            checkpointer.abort()
            code = 0
        finally:
            os._exit(code)
    job.train(FAILED_AT - 1)
    assert os.waitpid(child, 0)[1] == 0
    job.train(FAILED_AT)
    checkpointer.abort()
    again = resumed(hierarchy)
    assert again.checkpointer is not None and again.checkpointer.recovery is not None
    assert again.checkpointer.recovery.version == FAILED_AT
    assert again.checkpointer.recovery.fidelity is Fidelity.EXACT
    assert again.state() == uninterrupted(LAST).state()


def test_a_forked_process_may_attach_a_job_of_its_own(hierarchy: Hierarchy, tmp_path: Path) -> None:
    job = Job()
    job.attach(hierarchy)
    job.train(2)
    if not (child := os.fork()):
        code = 1
        try:
            own = Job()
            own.attach(Hierarchy.of(f"memory://forked-{uuid.uuid4().hex}", f"nvme://{tmp_path}/own?survives=rack"))
            own.train(FAILED_AT)
            assert own.checkpointer is not None
            own.checkpointer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    job.train(FAILED_AT)
    assert job.checkpointer is not None
    job.checkpointer.abort()


def test_an_interrupt_before_the_job_is_open_leaves_no_thread(
    hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiercheck.checkpointer.open_job", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        Job().attach(hierarchy)
    assert set(threading.enumerate()) == before


ENDS = """
import atexit, os, sys
from tests.jobs import Job
from tiercheck.hierarchy import Hierarchy

class Owner:
    def __init__(self, checkpointer):
        self.close = checkpointer.close

    def __del__(self, write=os.write):
        try:
            self.close()
        except Exception as error:
            write(2, str(error).encode())

job = Job()
job.attach(Hierarchy.of(sys.argv[1], f"nvme://{sys.argv[2]}?survives=rack"), deadline_s=300)
job.train(3)
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("atexit.register(job.checkpointer.close)", "functions of atexit"),
        ("owner = Owner(job.checkpointer)", "functions of atexit"),
        ("atexit.register(job.checkpointer.abort)", ""),
    ],
    ids=["atexit", "del", "abort"],
)
def test_who_closes_when_the_interpreter_ends_is_told_that_it_is_too_late(
    name: str, tmp_path: Path, end: str, said: str
) -> None:
    command = [sys.executable, "-W", "error", "-c", ENDS + end, f"shm://{name}?size=64MiB", str(tmp_path / "durable")]
    environment = {**os.environ, "PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.count("functions of atexit") == bool(said), done.stderr
    assert "cannot schedule" not in done.stderr


def test_provider_and_checkpointer_can_be_used_without_an_integration(hierarchy: Hierarchy) -> None:
    job = Job()
    provider = ModuleProvider(job.model, job.optimizer)
    with Checkpointer(provider, hierarchy) as checkpointer:
        job.model(torch.ones(2, 8)).sum().backward()
        checkpointer.capture(1, provider.gradients())
        job.optimizer.step()
        checkpointer.complete(1)
        assert checkpointer.stats.differentials == 1

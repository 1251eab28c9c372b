"""The ways in which users save a training job's state, each as its own documentation shows it.

A way is made and used in a process of its own environment: it imports its library late, and nothing of TierCheck but
the one that is TierCheck.
"""

from __future__ import annotations

import abc
import copy
import importlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["WAYS", "Job", "Kind", "Way", "cleaned", "delete", "hold_dlrover"]

SAVED = "v{:08d}"
POLL_S = 0.002
WAIT_S_MAX = 600.0
MEMORY = "peers-benchmark"


@dataclass(frozen=True)
class Job:
    """What is trained, and where it may keep files."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    directory: Path

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def place(self, version: int) -> Path:
        return self.directory / SAVED.format(version)

    def newest(self) -> int:
        """The newest version that was saved."""
        return max(int(path.name.split(".")[0][1:]) for path in self.directory.glob("v*"))


class Way(abc.ABC):
    """One of them. By default the user calls it after a step."""

    every_step = False
    """Whether it saves each step by itself once it has begun."""
    modules: tuple[str, ...] = ()
    """What its user imports at the top of a script: no save and no restart waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        for module in self.modules:
            importlib.import_module(module)

    def begin(self) -> None:  # noqa: B027  (most have nothing to begin)
        """From here on steps may be saved."""

    def after_step(self, version: int) -> None:  # noqa: B027  (most do nothing when nothing is saved)
        """The step to ``version`` is done, and is not to be saved."""

    @abc.abstractmethod
    def save(self, version: int) -> None:
        """Called after the step; when it returns, training goes on."""

    def wait(self) -> None:  # noqa: B027  (what is saved at once is waited for already)
        """Until what was saved last has been written."""

    def end(self) -> None:
        """No step is saved until :meth:`begin`."""
        self.wait()

    @abc.abstractmethod
    def load(self) -> None:
        """In a new process: the newest version, into the job's model and optimizer."""


class TorchSave(Way):
    def save(self, version: int) -> None:
        torch.save(self.job.state(), self.job.place(version))

    def load(self) -> None:
        version = self.job.newest()
        self.job.load(torch.load(self.job.place(version), mmap=True, weights_only=True))


class Safetensors(Way):
    modules = ("safetensors.torch",)

    def save(self, version: int) -> None:
        save_file = importlib.import_module("safetensors.torch").save_file
        save_file(dict(self._tensors()), self.job.place(version))

    def load(self) -> None:
        version = self.job.newest()
        found = importlib.import_module("safetensors.torch").load_file(self.job.place(version))
        with torch.no_grad():
            for parameter in self.job.model.parameters():
                self.job.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.empty_like(parameter),
                    "exp_avg_sq": torch.empty_like(parameter),
                }
            for name, tensor in self._tensors():
                tensor.copy_(found[name])

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        named = dict(self.job.model.named_parameters())
        moments = [
            (f"optimizer.{name}.{what}", tensor)
            for name, parameter in named.items()
            for what, tensor in self.job.optimizer.state[parameter].items()
        ]
        return [(f"model.{name}", parameter.detach()) for name, parameter in named.items()] + moments


class Dcp(Way):
    """torch.distributed.checkpoint, by one process without a group."""

    modules = tuple(
        f"torch.distributed.checkpoint.{name}" for name in ("state_dict", "state_dict_saver", "state_dict_loader")
    )

    def save(self, version: int) -> None:
        self._module("state_dict_saver").save(self._state(), checkpoint_id=str(self.job.place(version)))

    def load(self) -> None:
        version, state = self.job.newest(), self._state()
        self._module("state_dict_loader").load(state, checkpoint_id=str(self.job.place(version)))
        self._module("state_dict").set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = self._module("state_dict").get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    @staticmethod
    def _module(name: str) -> Any:
        return importlib.import_module(f"torch.distributed.checkpoint.{name}")


class DcpAsync(Dcp):
    """``async_save``: a copy at once, and the writing by a thread, or by a process."""

    kind = "THREAD"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._saving: Any = None

    def begin(self) -> None:
        group = importlib.import_module("torch.distributed")
        if not group.is_initialized():  # async_save asks for a group that works on the host
            group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)

    def save(self, version: int) -> None:
        self.wait()  # one at a time, as its documentation asks for
        saver = self._module("state_dict_saver")
        self._saving = saver.async_save(
            self._state(),
            checkpoint_id=str(self.job.place(version)),
            async_checkpointer_type=saver.AsyncCheckpointerType[self.kind],
        )

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result(WAIT_S_MAX)
            self._saving = None


class DcpAsyncProcess(DcpAsync):
    kind = "PROCESS"

    def begin(self) -> None:
        group = importlib.import_module("torch.distributed")
        if not group.is_initialized():  # the writing process meets this one by the environment
            group.init_process_group("gloo", rank=0, world_size=1)


class TorchSnapshot(Way):
    modules = ("torchsnapshot",)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._saving: Any = None

    def save(self, version: int) -> None:
        self.wait()
        snapshot = importlib.import_module("torchsnapshot").Snapshot
        self._saving = snapshot.async_take(str(self.job.place(version)), self._stateful())

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def load(self) -> None:
        version = self.job.newest()
        importlib.import_module("torchsnapshot").Snapshot(str(self.job.place(version))).restore(self._stateful())

    def _stateful(self) -> dict[str, Any]:
        return {"model": self.job.model, "optimizer": self.job.optimizer}


class DlRover(Way):
    """Flash Checkpoint: into shared memory at once, and to the disk by the node's agent (:func:`hold_dlrover`)."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        module = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer")
        self._to_disk = module.StorageType.DISK
        folder = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._checkpointer = folder.DdpCheckpointer(str(job.directory))
        self._saved = -1

    def save(self, version: int) -> None:
        state = {"version": version, **self.job.state()}
        self._checkpointer.save_checkpoint(
            version, state, str(self.job.place(version) / "state.pt"), storage_type=self._to_disk
        )
        self._saved = version

    def wait(self) -> None:
        """Its own waiting asks a file that may not be there yet, and does not know of a save that was left out because
        the one before was still being written: that one is saved here again."""
        told = self.job.directory / "dlrover_latest.txt"
        until = time.monotonic() + WAIT_S_MAX
        while self._saved >= 0 and not (told.exists() and told.read_text() == str(self._saved)):
            if time.monotonic() > until:
                raise TimeoutError(f"DLRover has not written version {self._saved} in {WAIT_S_MAX:.0f} s")
            if self._checkpointer._engine.latest_step != self._saved:
                self.save(self._saved)
            time.sleep(POLL_S)

    def load(self) -> None:
        state = self._checkpointer.load_checkpoint()
        # It lies in the memory that is saved, where an optimizer on the host would step on it: a second restart finds
        # that, and not what was saved.
        self.job.load({**state, "optimizer": copy.deepcopy(state["optimizer"])})


def hold_dlrover() -> None:
    """What runs beside the training, as its agent does under ``dlrover-run``: it writes, and outlives the trainers."""
    importlib.import_module(
        "dlrover.python.elastic_agent.torch.ckpt_saver"
    ).AsyncCheckpointSaver.start_async_saving_ckpt()


class Orbax(Way):
    """Its asynchronous checkpointer, which is given NumPy's views of the tensors."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._orbax: Any = importlib.import_module("orbax.checkpoint")
        self._checkpointer = self._orbax.AsyncCheckpointer(self._orbax.StandardCheckpointHandler())

    def save(self, version: int) -> None:
        self._checkpointer.save(self.job.place(version), args=self._orbax.args.StandardSave(self._arrays()))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def load(self) -> None:
        version = self.job.newest()
        for parameter in self.job.model.parameters():
            self.job.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        wanted = self._arrays()
        found = self._checkpointer.restore(self.job.place(version), args=self._orbax.args.StandardRestore(wanted))
        for name, array in wanted.items():
            array[...] = found[name]

    def _arrays(self) -> dict[str, Any]:
        arrays = {}
        for name, parameter in self.job.model.named_parameters():
            arrays[f"model.{name}"] = parameter.detach().numpy()
            for what, tensor in self.job.optimizer.state[parameter].items():
                arrays[f"optimizer.{name}.{what}"] = tensor.numpy()
        return arrays


class DeepSpeedTorch(Way):
    """DeepSpeed's default engine."""

    engine = "torch_checkpoint_engine.TorchCheckpointEngine"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        file, _, name = self.engine.partition(".")
        found = importlib.import_module(f"deepspeed.runtime.checkpoint_engine.{file}")
        self._engine = getattr(found, name)()

    def save(self, version: int) -> None:
        commit = importlib.import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine").CheckpointCommitInfo
        info = commit(tag=SAVED.format(version), save_dir=str(self.job.directory), save_latest=True)
        self._engine.create(info)
        self.job.place(version).mkdir()
        self._engine.save(self.job.state(), str(self.job.place(version) / "state.pt"))
        self._engine.commit(info)

    def load(self) -> None:
        version = self.job.newest()
        self.job.load(self._engine.load(str(self.job.place(version) / "state.pt"), map_location="cpu"))


class TierCheck(Way):
    """Every step, into shared memory, and from there to a directory."""

    every_step = True
    bases = "capture"
    modules = ("tiercheck.integrations.torch", "tiercheck.hierarchy", "tiercheck.config")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._checkpointer: Any = None

    def begin(self) -> None:
        """Anew: what was trained since the last time was not saved."""
        self._attach(fresh=True)

    def _attach(self, **options: Any) -> None:
        attach = importlib.import_module("tiercheck.integrations.torch").attach
        hierarchy = importlib.import_module("tiercheck.hierarchy").Hierarchy
        config = importlib.import_module("tiercheck.config").CheckpointConfig
        shm = f"shm://{MEMORY}-{self.job.directory.name}-{{rank}}"
        tiers = hierarchy.of(shm, f"nvme://{self.job.directory}/tiercheck?survives=rack")
        self._checkpointer = attach(
            self.job.model,
            self.job.optimizer,
            tiers,
            config=config(bases=self.bases, keep_left_behind=False, deadline_s=WAIT_S_MAX),
            **options,
        )

    def after_step(self, version: int) -> None:
        self._checkpointer.end_iteration()

    def save(self, version: int) -> None:
        self._checkpointer.end_iteration()

    def wait(self) -> None:
        self._checkpointer.flush()

    def end(self) -> None:
        self._checkpointer.close()

    def load(self) -> None:
        self._attach()


class TierCheckFold(TierCheck):
    bases = "fold"


@dataclass(frozen=True)
class Kind:
    """A way, and what its environment needs. ``None``: this process's own environment."""

    make: Callable[[Job], Way]
    packages: tuple[str, ...] | None = None
    holder: bool = False
    """Whether a process of its runs beside the training, and outlives it: :func:`hold_dlrover`."""


WAYS: Mapping[str, Kind] = {
    "tiercheck": Kind(TierCheck),
    "tiercheck-fold": Kind(TierCheckFold),
    "torch.save": Kind(TorchSave, ()),
    "safetensors": Kind(Safetensors, ("safetensors",)),
    "dcp": Kind(Dcp, ()),
    "dcp-async-thread": Kind(DcpAsync, ()),
    "dcp-async-process": Kind(DcpAsyncProcess, ()),
    "torchsnapshot": Kind(TorchSnapshot, ("torchsnapshot",)),
    "dlrover": Kind(DlRover, ("dlrover", "grpcio", "protobuf"), holder=True),
    "orbax": Kind(Orbax, ("orbax-checkpoint", "jax")),
    "deepspeed": Kind(DeepSpeedTorch, ("deepspeed",)),
}


def cleaned(directory: Path, keep: int = 2) -> None:
    """Only the newest versions stay, as with every user."""
    for path in sorted(directory.glob("v*"))[:-keep]:
        delete(path)


def delete(path: Path) -> None:
    """A file, or a folder with all that is in it; nothing if it is gone already."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

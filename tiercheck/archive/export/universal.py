"""An export that ``engine.load_checkpoint`` of DeepSpeed reads: a universal checkpoint.

DeepSpeed defines it for resuming under another ZeRO stage or number of ranks: for each trained parameter a directory,
and in it a file for the parameter in full precision and one for each tensor that the optimizer has for it. Engines read
it if their configuration says ``"checkpoint": {"load_universal": true}``. What is not trained, and the counters of the
engine, are in a file of model states beside it.

Each rank's state is rebuilt by itself, and its pieces are copied to their places in mapped files, one for each kind of
tensor. The checkpoint is written from those, a tensor at a time. So memory holds one rank's state, and the disk holds
the checkpoint twice while it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiercheck.archive.export.layout import PlainFile, laid_out
from tiercheck.archive.export.model import Model
from tiercheck.archive.rebuild import RankState
from tiercheck.errors import ConfigurationError
from tiercheck.format.container import TensorSpec
from tiercheck.format.index.assemble import Transfer
from tiercheck.format.index.boxes import copy_elements
from tiercheck.format.index.logical import MASTER, Role, lies_as_master
from tiercheck.streams.tensors.as_bytes import DTYPES, array_of, dtype_name, tensor_in
from tiercheck.types import Fidelity

__all__ = ["UniversalCheckpoint", "torch_save"]

MADE_FOR = "0.19.0"
"""The version of DeepSpeed whose format this is."""
FORMAT_VERSION = 0.4
"""What DeepSpeed calls ``universal_checkpoint_version``."""
FP32, STEP = "fp32", "step"
NEEDED_BY_ZERO3 = ("exp_avg", "exp_avg_sq")
WIDENED = frozenset({"F16", "BF16"})
NAMED_MAX = 3


@dataclass
class _Kind:
    """A file with one kind of tensor of every trained parameter."""

    path: Path
    file: PlainFile
    memory: Mapping[str, memoryview]
    dtype: str


@dataclass
class UniversalCheckpoint:
    """Made in the directory ``work``: :meth:`take` each rank once, and :meth:`write`."""

    model: Model
    work: Path
    version: int
    _kinds: dict[str, _Kind] = field(default_factory=dict)
    """By the name that DeepSpeed has for it, such as ``exp_avg``."""
    _steps: Counter[int] = field(default_factory=Counter)
    """How many masters have counted so many steps."""
    _left_out: dict[str, None] = field(default_factory=dict)
    """What the optimizer has and the format does not."""
    _groups: list[dict[str, Any]] | None = None
    _host_state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trained = {each.spec.name: each.spec.shape for each in self.model.outputs if each.tensor.trained}
        if odd := next((name for name in self._trained if not is_file_name(name)), None):
            raise ConfigurationError(f"{odd!r} cannot be the name of a directory, as the format deepspeed wants it")

    def take(self, state: RankState, by_source: Mapping[str, Sequence[Transfer]]) -> None:
        """Copy what a rank brings to the masters and the optimizer's tensors."""
        masters, states = state.state.masters(), state.state.optimizer_state()
        if self._groups is None:
            self._groups, self._host_state = state.hyperparameters, state.host_state
        for source, transfers in by_source.items():
            if not source.startswith(MASTER):
                continue
            name = source.removeprefix(MASTER)
            self._put(FP32, masters[name], transfers)
            for key, value in states.get(name, {}).items():
                held = torch.as_tensor(value) if isinstance(value, torch.Tensor | int | float) else None
                if held is not None and key == STEP and held.numel() == 1:
                    self._steps[int(held)] += 1
                elif held is not None and lies_as_master(key, tuple(held.shape), tuple(masters[name].shape)):
                    self._put(key, held, transfers)
                elif value is not None:
                    self._left_out[key] = None

    def _put(self, kind: str, tensor: torch.Tensor, transfers: Sequence[Transfer]) -> None:
        into = self._kind(kind, dtype_name(tensor, kind))
        if torch.promote_types(tensor.dtype, DTYPES[into.dtype]) != DTYPES[into.dtype]:
            raise ConfigurationError(f"the optimizer's {kind} is of several dtypes, which the format deepspeed lacks")
        held = array_of(tensor.flatten().to(DTYPES[into.dtype]))
        for each in transfers:
            memory = into.memory[self.model.output_of[each.target]]
            copy_elements([each.copy], held, np.frombuffer(memory, held.dtype))

    def _kind(self, kind: str, dtype: str) -> _Kind:
        if kind not in self._kinds:
            dtype = "F32" if dtype in WIDENED else dtype
            file = laid_out([TensorSpec(name, dtype, shape) for name, shape in self._trained.items()], {})
            path = self.work / f"kind-{len(self._kinds)}"
            self._kinds[kind] = _Kind(path, file, file.make(path), dtype)
        return self._kinds[kind]

    # Writing

    def write(self, out: Path, module: Mapping[str, torch.Tensor], said: str) -> tuple[str, ...]:
        """``module``: every tensor of the model, under all of its names. Returns what there is to know."""
        tag = f"global_step{self.version}"
        where = out / tag / "zero"
        where.mkdir(parents=True)
        for name, shape in self._trained.items():
            (where / name).mkdir()
            for kind, held in self._kinds.items():
                tensor = tensor_in(held.memory[name], held.dtype, shape, what=name)
                torch_save({"param": tensor, "cat_dim": 0}, where / name / f"{kind}.pt")
            if self._steps:
                torch_save(self._step, where / name / f"{STEP}.pt")
        torch_save(self._optimizer_state(), where / "optimizer_state.pt")
        states = self._model_states(said)
        torch_save({**states, "module": dict(module)}, out / tag / "mp_rank_00_model_states.pt")
        torch_save(states, out / tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")  # ZeRO-3 looks for this one
        for each in ("latest", "latest_universal"):
            (out / each).write_text(tag)
        return tuple(self._notes())

    @property
    def _step(self) -> torch.Tensor:
        return torch.tensor(float(max(self._steps, default=self.version)), dtype=torch.float32)

    @property
    def fidelity(self) -> Fidelity:
        """Whether the format can say all that was saved of the optimizer."""
        return Fidelity.APPROXIMATE if len(self._steps) > 1 or self._left_out else Fidelity.EXACT

    @property
    def nbytes(self) -> int:
        """Of the tensors of the parameters and of the optimizer."""
        return sum(spec.nbytes for held in self._kinds.values() for spec in held.file.specs)

    def _optimizer_state(self) -> dict[str, Any]:
        groups = [{**group, "params": []} for group in self._groups or []]
        return {
            "ds_version": MADE_FOR,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {STEP: self._step}}, "param_groups": groups},
        }

    def _model_states(self, said: str) -> dict[str, Any]:
        counters = self._host_state.get("counters", {})
        samples = {"global_samples": counters["global_samples"]} if "global_samples" in counters else {}
        scheduler = self._scheduler
        return {
            "module": {},
            "optimizer": None,
            "lr_scheduler": None if scheduler is None else scheduler[0],
            "global_steps": self.version,
            "skipped_steps": counters.get("skipped_steps", 0),
            **samples,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": MADE_FOR,
            "buffer_names": [each.spec.name for each in self.model.outputs if each.tensor.role is Role.BUFFER],
            "universal_checkpoint_info": {"universal_checkpoint_version": FORMAT_VERSION},
            "tiercheck": said,
        }

    @property
    def _scheduler(self) -> tuple[Mapping[str, Any], bool] | None:
        """The scheduler's state, and whether its step of this version is still to come."""
        engines, loops = self._host_state.get("scheduler"), self._host_state.get("after_step", {}).get("scheduler")
        if engines is not None:
            return engines["state"], bool(engines["steps"])
        return None if loops is None else (loops, False)

    def _notes(self) -> list[str]:
        said = []
        untrained = [each.spec.name for each in self.model.outputs if not each.tensor.trained]
        if untrained:
            said.append(
                f"{len(untrained)} tensors are not trained ({', '.join(untrained[:NAMED_MAX])}"
                f"{', ...' if len(untrained) > NAMED_MAX else ''}): DeepSpeed does not load those from a universal "
                'checkpoint; they are in mp_rank_00_model_states.pt, under "module"'
            )
        if len(self._steps) > 1:
            counted = ", ".join(map(str, sorted(self._steps)))
            said.append(f"parameters have counted different steps ({counted}), and the format has one: the largest")
        if self._left_out:
            named = ", ".join(self._left_out)
            said.append(f"left out, since it is not as large as its parameter: the optimizer's {named}")
        if lacking := [kind for kind in NEEDED_BY_ZERO3 if kind not in self._kinds]:
            said.append(f"the optimizer has no {' and no '.join(lacking)}, without which ZeRO-3 does not load it")
        if len(self._groups or []) > 1:
            said.append("DeepSpeed's ZeRO-3 gives all parameter groups the options of the first one")
        if self._scheduler is None:
            said.append("no scheduler was saved: an engine with one loads with load_lr_scheduler_states=False")
        elif self._scheduler[1]:
            said.append(
                "the scheduler is as it was before its step of this version, which DeepSpeed takes last: call "
                "engine.lr_scheduler.step() once after loading"
            )
        return said


def torch_save(value: object, path: Path) -> None:
    """Errors: ``OSError``; given a path, torch says of a full disk that a position is unexpected."""
    with path.open("wb") as file:
        torch.save(value, file)


def is_file_name(name: str) -> bool:
    return "/" not in name and "\0" not in name and name not in (".", "..")

"""The training state of a DeepSpeed engine: ZeRO stages 0 to 3, in fp32, bf16 and fp16, pipelines included.

:class:`DeepSpeedProvider` is a :class:`~tiercheck.streams.tensors.provider.StateProvider`. What is peculiar to it:

- The inner optimizer's public step hooks see every update, but one iteration may call ``step`` several
  times (:mod:`tiercheck.integrations.deepspeed.layouts`). A pre-hook asks :meth:`~DeepSpeedProvider.visited_in_hook`
  which masters this call updates; the iteration is complete when :meth:`~DeepSpeedProvider.expected` were visited.
- The last post-hook runs *before* the tail of DeepSpeed's iteration: the low-precision copy, the scheduler's
  step, the counters. :meth:`~DeepSpeedProvider.host_state` therefore records the state together with what the
  tail will do to it, and :meth:`~DeepSpeedProvider.restore_host_state` finishes that tail. A version that is published
  later, when the loop says so or the next forward pass begins, has it behind it.
- An iteration whose gradients are not finite is skipped, and no hook runs: :meth:`~DeepSpeedProvider.skipped_after`
  finds such versions from DeepSpeed's counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.pipe.engine import PipelineEngine

from tiercheck.errors import Mismatch, SaveError, UnsupportedSetup
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.integrations.after_loss import AfterLoss
from tiercheck.integrations.deepspeed.behind_step import BehindStep
from tiercheck.integrations.deepspeed.cpu_adam import CPUAdamPowers
from tiercheck.integrations.deepspeed.layouts import Master, MasterLayout, layout_of
from tiercheck.integrations.deepspeed.loss_scale import LossScale
from tiercheck.integrations.deepspeed.meaning import index_of
from tiercheck.integrations.deepspeed.scheduler import EngineScheduler
from tiercheck.integrations.deepspeed.stages import norms_of, stage_of
from tiercheck.integrations.deepspeed.support import refuse_odd_masters, refuse_unsupported
from tiercheck.streams.tensors.bare_step import bare_step
from tiercheck.streams.tensors.beside import Beside, End
from tiercheck.streams.tensors.extra_state import ExtraState
from tiercheck.streams.tensors.group_options import GroupOptions, set_options
from tiercheck.streams.tensors.joint import objects_held
from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.own_state import OwnState
from tiercheck.streams.tensors.placing import copies
from tiercheck.streams.tensors.provider import (
    Identity,
    OptimizerIdentity,
    StateProvider,
    check_shapes,
    copy_into,
    extras_of,
    loaded_value,
)
from tiercheck.streams.tensors.stage import PipelineStage
from tiercheck.streams.tensors.storable import to_plain

__all__ = ["DeepSpeedProvider", "supported"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def supported(engine: Any) -> None:
    """Raise ``UnsupportedSetup``, saying what was found and what is supported, if the engine's state
    could not be saved whole."""
    refuse_unsupported(engine)
    layout_of(engine)


class DeepSpeedProvider:
    """One rank's state of an engine that ``deepspeed.initialize`` returned.

    Errors: ``UnsupportedSetup`` (see :func:`supported`).
    """

    def __init__(self, engine: Any, beside: Beside | None = None) -> None:
        refuse_unsupported(engine)
        self.beside = beside or Beside()
        self._engine = engine
        self._tensors = ModuleTensors(engine.module)
        self._layout: MasterLayout = layout_of(engine)
        self._own_state = OwnState(self._layout.inner)
        self._options = GroupOptions(self.groups())
        self._powers = CPUAdamPowers(self._layout)
        self._replaying = False
        self._forward_begins: Callable[[], None] = lambda: None
        self._between = False
        self._scheduler = EngineScheduler(engine)
        self._loss_scale = LossScale(engine)
        self.after_loss = AfterLoss()
        self.extra_state = ExtraState(engine.module)
        self.behind_step = BehindStep(engine, self.groups, self.buffers, self._loss_scale, self.extra_state)
        self._restored_micro_steps = -1
        """How many micro-batches there were as of the version restored."""
        self._at_step: dict[str, Any] | None = None
        """The engine's host state as of the last step with its tail, if the version is not published otherwise."""
        refuse_odd_masters(self._layout)

    # What the rank trains

    def identity(self) -> Identity:
        engine = self._engine
        parameters = [
            f"{name} {tuple(getattr(parameter, 'ds_shape', parameter.shape))} {parameter.dtype}"
            for name, parameter in engine.module.named_parameters()
        ]
        optimizer = OptimizerIdentity.of(self._layout.inner, next(iter(self.masters().values())).device)
        return Identity.of(self._framework(), self, optimizer, parameters=parameters)

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {master.name: master.tensor.detach() for master in self._layout.masters()}

    def group_of(self) -> Mapping[str, int]:
        return {master.name: master.group for master in self._layout.masters()}

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        """Those in which the engine accumulates them. They come in fp32, multiplied by one number."""
        return dict.fromkeys(self.masters(), self._accumulation_dtype())

    def steps_together(self) -> bool:
        return False

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        """The engine measures its throughput, unless its options say otherwise."""
        self._forward_begins = begins
        return True

    def forward_begins(self) -> None:
        """Told by a hook of the module, which the engine calls when it has waited for the GPU."""
        self._forward_begins()

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return self._layout.optimizer_state()

    def held_by_optimizer(self) -> Sequence[Any] | None:
        return objects_held(self._layout.inner)

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of every parameter that the optimizer does not update."""
        trained = chain.from_iterable(self._layout.trained())
        return {name: self._layout.local_part(parameter) for name, parameter in self._tensors.others(trained).items()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The persistent buffers, live. The forward pass may move them (running statistics), so that a
        differential which leaves them out is exact only for modules that do not."""
        return self._tensors.buffers()

    def index(self) -> LogicalIndex:
        return index_of(self._engine, self._layout, self._tensors)

    def hyperparameters(self) -> list[dict[str, Any]]:
        return self._powers.added_to(self._own_state.added_to(self._options.plain(self.groups())))

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, live."""
        return self._layout.groups()

    def stage(self) -> PipelineStage | None:
        """``None`` if the engine is no pipeline's."""
        return stage_of(self._engine, self._layout, self._tensors, self.beside)

    def measure_norms(self) -> None:
        """From here on, versions hold the norms of the gradients, if the engine is a pipeline's."""
        if isinstance(self._engine, PipelineEngine):
            self.after_loss.norms = norms_of(self._layout, self._tensors)

    # What the hooks of the inner optimizer see

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer: register step hooks on it. They survive ``engine.load_checkpoint``."""
        return self._layout.inner

    @property
    def called(self) -> torch.nn.Module:
        """The module whose call begins a forward pass: the engine; of a pipeline's engine, which nobody calls, the one
        in it."""
        module: torch.nn.Module = self._engine.module if isinstance(self._engine, PipelineEngine) else self._engine
        return module

    @property
    def training(self) -> bool:
        """Whether a forward pass now would be one of training."""
        return bool(self._engine.module.training)

    @property
    def replaying(self) -> bool:
        """Whether :meth:`apply` runs: the hooks fire in it too, and must ignore those calls."""
        return self._replaying

    def expected(self) -> frozenset[str]:
        """The masters that all calls of one iteration visit together."""
        return frozenset(master.name for master in self._layout.masters())

    def visited_in_hook(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """The masters this call of ``step`` updates, with a gradient or without."""
        return frozenset(master.name for master in self._in_hook(optimizer))

    def gradients_in_hook(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The gradients this call of ``step`` applies: unscaled, clipped, in the master's dtype and shape.

        Live: DeepSpeed frees them right after the call. A master without a gradient is left out.
        Errors: ``UnsupportedSetup`` for a sparse gradient.
        """
        found: dict[str, torch.Tensor] = {}
        for master in self._in_hook(optimizer):
            gradient = master.tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise UnsupportedSetup(
                    f"the gradient of {master.name} is {gradient.layout}; supported are dense gradients "
                    "(for an embedding: sparse=False)"
                )
            found[master.name] = gradient.detach()
        return found

    # Versions

    @property
    def version(self) -> int:
        """The version this iteration ends with: DeepSpeed's ``global_steps``, counting a step under way."""
        return int(self._engine.global_steps) + int(self._inside_step())

    def skipped_steps(self) -> int:
        """How many iterations DeepSpeed has skipped since training began."""
        return int(self._engine.skipped_steps)

    def skipped_after(self, version: int, skipped_steps: int) -> range:
        """The versions after ``version`` that ended without an update, since their gradients were not finite.

        ``skipped_steps`` is what :meth:`skipped_steps` returned at ``version``. Call it in the engine's
        forward pre-hook (between iterations) or in the first pre-hook of a step.

        Errors: ``SaveError`` if DeepSpeed's counters moved otherwise than by skipping: an update was missed,
        or the engine was sent back to an older version.
        """
        if self._engine.global_steps < version:
            raise SaveError(
                f"the engine went back to version {self._engine.global_steps} after version {version} was saved "
                "(engine.load_checkpoint?): attach again, so that what follows starts a generation of its own"
            )
        missing = range(version + 1, int(self._engine.global_steps) + 1)
        if len(missing) != self.skipped_steps() - skipped_steps:
            raise SaveError(
                f"versions {missing.start}..{missing.stop - 1} ended unseen, of which DeepSpeed skipped "
                f"{self.skipped_steps() - skipped_steps}: attach again after engine.load_checkpoint"
            )
        return missing

    # Host state

    def end_of_step(self) -> None:
        """All masters were visited. Call it in the hook."""
        self._own_state.look()
        self.beside.end_of_step()
        self._at_step = self._engine_state()

    def end_of_iteration(self, end: End) -> None:
        """Errors: as :meth:`host_state`."""
        self.beside.end_of_iteration(end)
        if end is not End.UNSEEN:  # else the next iteration may have changed what the engine holds
            self._at_step = self._engine_state()

    def published(self) -> None:
        self.behind_step.published()
        self.beside.published()
        self._at_step = None

    def host_state(self) -> dict[str, Any]:
        """Everything else the next iteration depends on, as of the end of the current iteration.

        Errors: ``SaveError`` in the middle of gradient accumulation, when gradients live that nobody saves,
        or if the scheduler was not stepped exactly once an iteration, by the engine.
        """
        return {**(self._at_step or self._engine_state()), **self.beside.host_state()}

    def _engine_state(self) -> dict[str, Any]:
        engine = self._engine
        inside = self._inside_step()
        if not inside:
            self._refuse_half_accumulated()
        counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
        if inside:
            counters["global_steps"] += 1
            counters["global_samples"] += self._samples_of_this_iteration()
            counters["micro_steps"] += 0 if isinstance(engine, PipelineEngine) else 1
        return {
            "counters": counters,
            "hyperparameters": self.hyperparameters(),
            "scheduler": self._scheduler.state(inside=inside, counters=counters),
            "loss_scale": self._loss_scale.state(),
            "sampler_epoch": getattr(self._sampler(), "epoch", None),
            "model_parallel_random": to_plain(dict(get_cuda_rng_tracker().get_states()), "model_parallel_random"),
            **self.extra_state.host_state(),
            **self.after_loss.host_state(),
        }

    def translated_host_state(self, state: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Of another stage or number of ranks, and of loops that hold the scheduler themselves."""
        found, engine = dict(state), self._engine
        each = engine.gradient_accumulation_steps()
        counted = {"global_steps": version, "global_samples": version * int(engine.train_batch_size())}
        counters = {**counted, "micro_steps": version * each, "skipped_steps": 0, **state.get("counters", {})}
        if counters["micro_steps"] % each:
            counters["micro_steps"] = version * each
        found["counters"] = counters
        if "scheduler" not in state:
            after_step = dict(state.get("after_step", {}))
            if engine.lr_scheduler is not None and "scheduler" in after_step:
                found["scheduler"] = self._scheduler.of_a_loop(after_step.pop("scheduler"))
            found["after_step"] = after_step
        scale = self._engine_state()["loss_scale"]
        if scale.keys() != state.get("loss_scale", {}).keys():
            found["loss_scale"] = scale
        return found

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned, and finish the tail of the iteration it was taken in.

        Errors: ``Mismatch`` if the job has another scheduler than the checkpoint, or other ``stateful`` objects.
        """
        engine = self._engine
        self._scheduler.check(state["scheduler"])
        self.beside.restore(state)
        self._set_hyperparameters(state["hyperparameters"])
        self._scheduler.restore(state["scheduler"], self._layout.groups())
        for name in _COUNTERS:
            setattr(engine, name, state["counters"][name])
        self._restored_micro_steps = engine.micro_steps
        self._loss_scale.restore(state["loss_scale"])
        if state["sampler_epoch"] is not None and hasattr(self._sampler(), "set_epoch"):
            self._sampler().set_epoch(state["sampler_epoch"])
        generators = state["model_parallel_random"]
        get_cuda_rng_tracker().set_states({name: torch.from_numpy(each.copy()) for name, each in generators.items()})
        self.extra_state.restore(state)
        self.after_loss.restore(state)
        self.beside.restore_generators(state)

    # Restoring tensors

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        """Make the given values (copied) the rank's state. :meth:`refresh` must follow.

        The optimizer's tensors are written in place if they fit.
        Errors: ``Mismatch`` if names or shapes differ; nothing was changed then.
        """
        self._check_groups(hyperparameters)
        unknown = sorted(optimizer_state.keys() - self.expected())
        if unknown:
            raise Mismatch(f"the checkpoint has optimizer state for {', '.join(unknown[:5])}, which this rank lacks")
        check_shapes(self.masters(), masters)
        copy_into(extras_of(self), extras)
        copy_into(self.masters(), masters)
        for master in self._layout.masters():
            self._load_optimizer_state(master, optimizer_state.get(master.name, {}))
        self._layout.forget_state_links()
        self._set_hyperparameters(hyperparameters)

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        """Replay one step: the inner optimizer's own ``step``, called as DeepSpeed calls it.

        Errors: ``Mismatch`` for a gradient of an unknown master or of another size, or for other groups;
        nothing was changed then.
        """
        self._check_gradients(gradients)
        self._set_hyperparameters(hyperparameters)
        between = self._layout.gradient_buffers()
        self._replaying = True
        try:
            for call in self._layout.calls():
                copied = copies(gradients, {master.name: master.tensor for master in call})
                for master in call:
                    gradient = copied.get(master.name)
                    master.tensor.grad = None if gradient is None else gradient.view_as(master.tensor)
                del copied
                with self._layout.narrowed(call):
                    bare_step(self._layout.inner)
                    self._powers.stepped()
        finally:
            self._replaying = False
            for tensor, gradient in between:
                tensor.grad = gradient

    def refresh(self) -> None:
        """Rebuild every parameter of the module from the masters. Collective."""
        with torch.no_grad():
            self._layout.refresh()

    # Helpers

    def _framework(self) -> str:
        engine = self._engine
        name = (
            f"deepspeed-zero{int(engine.zero_optimization_stage())}-{'bf16' if engine.bfloat16_enabled() else 'fp32'}"
        )
        if engine.bfloat16_enabled() and self._accumulation_dtype() is torch.float32:
            name += "-fp32accumulation"
        if isinstance(engine, PipelineEngine):
            name += f"-pipeline{engine.num_stages}"
        return name

    def _accumulation_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._engine.get_data_types()[1]
        return dtype

    @contextmanager
    def between_iterations(self) -> Iterator[None]:
        """What is asked meanwhile is asked of the iteration that has ended, even in a hook of the next one."""
        self._between = True
        try:
            yield
        finally:
            self._between = False

    def _inside_step(self) -> bool:
        if self._between:
            return False
        if isinstance(self._engine, PipelineEngine):
            return bool(self._engine._force_grad_boundary)
        return bool(self._engine._running_engine_step)

    def _in_hook(self, optimizer: torch.optim.Optimizer) -> list[Master]:
        self._layout.groups()  # a load may have replaced the groups; each call shows the one it steps
        seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [master for master in self._layout.masters() if id(master.tensor) in seen]

    def _samples_of_this_iteration(self) -> int:
        engine = self._engine
        if engine.managed_gradient_accumulation():
            return int(engine.train_batch_size())
        return int(engine.train_batch_size() // engine.gradient_accumulation_steps() * engine._unmanaged_backward_count)

    def _refuse_half_accumulated(self) -> None:
        engine = self._engine
        if isinstance(engine, PipelineEngine) or engine._is_gradient_accumulation_boundary is not None:
            return
        if engine.micro_steps == self._restored_micro_steps:
            return  # a loop that says where a step's last micro-batch is, as Accelerate does, counts fewer of them
        if engine.managed_gradient_accumulation():
            pending = engine.micro_steps % engine.gradient_accumulation_steps()
        else:
            pending = engine._unmanaged_backward_count
        if pending:
            raise SaveError(
                f"{pending} micro-batches have been accumulated since version {engine.global_steps}, and their "
                "gradients are not saved: save between iterations"
            )

    def _sampler(self) -> Any:
        return getattr(self._engine.training_dataloader, "data_sampler", None)

    def _check_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        elements = {name: tensor.numel() for name, tensor in self.masters().items()}
        unknown = sorted(gradients.keys() - elements.keys())
        if unknown:
            names = ", ".join(unknown[:5])
            raise Mismatch(f"the differential has gradients of {names}, which this rank does not update")
        for name, gradient in gradients.items():
            if gradient.numel() != elements[name]:
                raise Mismatch(f"the gradient of {name} has {gradient.numel()} elements, not {elements[name]}")

    def _check_groups(self, hyperparameters: list[dict[str, Any]]) -> None:
        groups = self._layout.groups()
        if len(groups) != len(hyperparameters):
            raise Mismatch(f"the checkpoint has {len(hyperparameters)} parameter groups, this job {len(groups)}")

    def _set_hyperparameters(self, hyperparameters: list[dict[str, Any]]) -> None:
        self._check_groups(hyperparameters)
        taken = self._powers.taken_from(self._own_state.taken_from(hyperparameters))
        for group, options in zip(self._layout.groups(), taken, strict=True):
            set_options(group, options)

    def _load_optimizer_state(self, master: Master, saved: Mapping[str, Any]) -> None:
        states = self._layout.inner.state
        current = states.get(master.tensor) or {}
        options, device = self._layout.groups()[master.group], master.tensor.device
        loaded = {key: loaded_value(current.get(key), value, options, device) for key, value in saved.items()}
        states.pop(master.tensor, None)
        if loaded:
            states[master.tensor] = loaded


if TYPE_CHECKING:
    _conforms: Callable[[Any], StateProvider] = DeepSpeedProvider

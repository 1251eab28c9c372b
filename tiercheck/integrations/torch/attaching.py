"""Plain PyTorch: any ``torch.optim.Optimizer``, on one process, under DDP or FSDP2, through public step hooks.

::

    checkpointer = attach(model, optimizer, Hierarchy.of("shm://my-run", "nvme:///shared/my-run?survives=rack"))
    for step in range(checkpointer.version, steps):
        ...                             # the loop stays as it is
        checkpointer.end_iteration()    # or not: see below

``attach`` restores the newest version there is, and from then on every ``optimizer.step()`` is a version.

A version is published at the end of its iteration, with everything as of then: when the loop calls ``end_iteration``,
or else when the next forward pass of training begins. A failure before that costs the iteration, which is trained again
to the same bits. Without ``end_iteration`` the random generators, and whatever of ``stateful`` batches are drawn from,
are saved as of the end of ``optimizer.step()``, before the next batch is drawn from them
(:mod:`tiercheck.streams.tensors.beside`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.forgotten import (
    refuse_forgotten_scaler,
    refuse_forgotten_scheduler,
    refuse_schedulers_held_elsewhere,
    scheduled_wrappers,
)
from tiercheck.integrations.hooks import Arguments, StepHooks, attach_hooks, uncompiled, unless_compiled
from tiercheck.integrations.iterations import Iterations
from tiercheck.integrations.repeatability import Repeatability
from tiercheck.integrations.replicas import Alike
from tiercheck.integrations.torch.all_reduce import Compression, compressed_all_reduce
from tiercheck.integrations.torch.bucket_order import BucketOrder
from tiercheck.integrations.torch.closure import Closure
from tiercheck.integrations.torch.communication_hooks import LaterHooks, unsaved_states
from tiercheck.integrations.torch.joint_steps import JointSteps
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.integrations.torch.pipelines import FormPass, rounds_otherwise
from tiercheck.integrations.torch.replicated import DataParallel
from tiercheck.integrations.torch.stages import norms_of, stage_of
from tiercheck.integrations.wrapped import bare_optimizer
from tiercheck.policy.policies import Policies
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.request import Request
from tiercheck.runtime.group import Group, SingleProcess, TorchGroup
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.beside import Beside
from tiercheck.streams.tensors.joint import AnyOptimizer, JointOptimizer, parts_of
from tiercheck.streams.tensors.owned import OwnedProvider
from tiercheck.streams.tensors.stage import PipelineStage

__all__ = ["Compression", "attach", "compressed_all_reduce"]


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    hierarchy: Hierarchy,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    stateful: Mapping[str, Any] | None = None,
    after_step: Mapping[str, Any] | None = None,
    config: CheckpointConfig | None = None,
    policies: Policies | None = None,
    group: Group | None = None,
    version: int | None = None,
    generation: int | None = None,
    fresh: bool = False,
    loading: Loading | None = None,
    stage: tuple[int, int] | None = None,
    on_lost_stage: LostStage | str | None = None,
) -> Checkpointer:
    """Restore the newest version, then save every one that follows. Collective if ``torch.distributed`` runs.

    ``model`` may be under DDP or ``fully_shard``; make the optimizer after that, and attach last. Of several optimizers
    each has parameters of its own, and steps at most once in an iteration, which ends when the loop calls
    ``end_iteration``; then it is a version.
    ``scheduler``, ``scaler`` and each of ``stateful`` and ``after_step`` have ``state_dict`` and ``load_state_dict``.
    Batches must be a function of the version, or come from one of ``stateful``, for the resumed run to be the same one.
    (A step that a ``GradScaler`` skips is no version: then choose the batch by ``checkpointer.version``, not by a
    counter.) ``after_step`` is what the loop changes after ``optimizer.step()``, such as an average or a best metric: a
    loop that calls ``end_iteration`` may pass that as ``stateful`` as well.

    ``version`` goes back to an older version on purpose, ``generation`` says of which generation, and ``fresh`` begins
    anew at version 0. Either is done once: a restart that asks for the same goes on from the newest version. What is
    left behind stays in the tiers that all ranks share (``CheckpointConfig.keep_left_behind``).
    ``loading`` says what may be done with a checkpoint of another model, which is refused otherwise, and where in the
    data each rank goes on if their number has changed (:class:`~tiercheck.streams.loading.Loading`). All ranks must
    give the same.
    ``stage`` says that ``model`` is a stage of a pipeline: which one, from 0, and of how many. ``on_lost_stage``: what
    is done if no copy of a stage is left, such as ``"neighbours"``; by default the start is refused. With it each
    version also holds the norms of the gradients.
    Errors: ``UnsupportedSetup`` for a set-up that cannot be saved whole, and those of :class:`Checkpointer`.
    """
    request = Request(version, generation, fresh)
    distributed = dist.is_available() and dist.is_initialized()
    lost = None if on_lost_stage is None else LostStage.of(on_lost_stage)
    if group is None and not distributed and int_of("WORLD_SIZE", 1) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before attach()"
        )
    deadline_s = (config or CheckpointConfig()).deadline_s
    ranks = group or (TorchGroup(deadline_s=deadline_s) if distributed else SingleProcess())
    own = {name: each for name, each in (("scheduler", scheduler), ("scaler", scaler)) if each is not None}

    made: list[_Hooks] = []
    stages: list[PipelineStage] = []

    def hook() -> _Hooks:
        if clash := sorted(own.keys() & {*(stateful or {}), *(after_step or {})}):
            raise ConfigurationError(f"{clash[0]!r} is the name of an argument of its own: give it another one")
        given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
        if not given:
            raise ConfigurationError("optimizer= is empty: give an optimizer, or several, as [one, other]")
        bares = [bare_optimizer(each) for each in given]
        refuse_hidden_powers(bares)
        bare = JointOptimizer(bares) if len(bares) > 1 else bares[0]
        order = BucketOrder(model)
        beside = Beside({**own, **(after_step or {}), **order.stateful}, stateful)
        order.note_states(beside.given())
        only = scheduler if len(bares) == 1 else None  # of several, each has one of its own
        for one, as_given in zip(bares, given, strict=True):
            refuse_forgotten_scheduler(chain((one, as_given), scheduled_wrappers(one)), only, beside)
        provider = provider_for(model)(model, bare, beside=beside)
        provider.trains_on_compressed = config is not None and config.train_on_compressed
        if stage is not None:
            scheduled = scheduler is not None or any(isinstance(each, LRScheduler) for each in beside.given())
            stages.append(stage_of(stage, model, bare, scheduled=scheduled))
        elif lost is not None:
            raise ConfigurationError(
                "on_lost_stage is for pipelines: say which stage this rank is, and of how many, such as stage=(0, 4), "
                "or leave it out"
            )
        if lost is not None:
            provider.after_loss.norms = norms_of(model, bare)
        made.append(_Hooks(provider, model, bare, order, only))
        return made[0]

    return attach_hooks(
        hook,
        hierarchy,
        ranks,
        config,
        policies,
        request,
        loading,
        replicating=lambda: made[0],
        stage=lambda: stages[0] if stages else None,
        on_lost_stage=lost,
    )


def refuse_hidden_powers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Errors: ``UnsupportedSetup`` for what computes with numbers that nothing here can save."""
    compiled = getattr(sys.modules.get("deepspeed.ops.adam"), "DeepSpeedCPUAdam", ())
    if any(isinstance(each, compiled) for each in optimizers):
        raise UnsupportedSetup(
            "DeepSpeedCPUAdam keeps powers of its betas outside of its state, and is saved only as an engine's "
            "optimizer, by tiercheck.integrations.deepspeed.attach: take torch.optim.AdamW(fused=True), or DeepSpeed"
        )


def provider_for(model: torch.nn.Module) -> type[ModuleProvider]:
    """What knows where the model's tensors lie. Errors: ``UnsupportedSetup``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it takes a second to import, and who shards has done so
    if any(isinstance(each, getattr(fsdp, "FullyShardedDataParallel", ())) for each in model.modules()):
        raise UnsupportedSetup(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters; supported is FSDP2: "
            "torch.distributed.fsdp.fully_shard"
        )
    sharded = any(isinstance(each, getattr(fsdp, "FSDPModule", ())) for each in model.modules())
    tensors = sys.modules.get("torch.distributed.tensor")
    if not sharded and not any(isinstance(each, getattr(tensors, "DTensor", ())) for each in model.parameters()):
        return ModuleProvider
    from tiercheck.integrations.fsdp.sharded_provider import ShardedProvider

    return ShardedProvider


class Parallel(Protocol):
    """What makes tensors of the model alike on several ranks."""

    def alike(self, masters: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> Alike:
        """Of these tensors, live, those that are."""

    def forward(self) -> None:
        """A forward pass of training begins."""

    def check_step(self) -> None:
        """Errors: ``UnsupportedSetup`` if ranks that are to stay alike step on gradients that may differ."""


def parallel_of(model: torch.nn.Module, provider: ModuleProvider) -> Parallel:
    if not provider.gathers:
        return DataParallel(model)
    from tiercheck.integrations.fsdp.replicated import MeshReplicas

    return MeshReplicas(model)


class _Hooks:
    """From the optimizer's hooks to the checkpointer, once there is one."""

    def __init__(
        self,
        provider: ModuleProvider,
        model: torch.nn.Module,
        optimizer: AnyOptimizer,
        order: BucketOrder,
        scheduler: Any,
    ) -> None:
        self.provider = provider
        self._model = model
        self._order = order
        self._parallel = parallel_of(model, provider)
        self._later_hooks = LaterHooks(model)
        self._owned: OwnedProvider | None = None
        self._scheduler = scheduler
        self._checkpointer: Checkpointer | None = None
        self._iterations: Iterations | None = None
        self._closure: Closure | None = None
        """Of the step that runs."""
        self._form_pass: FormPass | None = None
        """Until the first step of a job that goes on."""
        self._has_stepped = False
        self._repeatability = Repeatability()
        self._optimizer = optimizer
        self._step_hooks = {each: StepHooks(each, self._before_step, self._after_step) for each in parts_of(optimizer)}
        self._joint = JointSteps(provider, optimizer) if isinstance(optimizer, JointOptimizer) else None
        self._modules = frozenset(model.modules())
        called = frozenset(called_modules(model))
        self._forward_hooks = self._before_calls_of(called, self._before_forward)
        self._part_hooks = self._before_calls_of(self._modules - called, self._before_part)
        """A loop may call the model's parts, or a method of it that does. If it calls the model itself, they are
        removed: each call of a module takes longer with a hook."""

    def caveats(self) -> list[str]:
        beside = self.provider.beside
        hooks = unsaved_states(self._model, beside.given())
        sums = [*self._order.caveats(), *rounds_otherwise(self._model)]
        return [*beside.caveats(), *self.provider.extra_state.caveats(), *sums, *hooks]

    def alike(self) -> Alike:
        return self._parallel.alike(self.provider.masters(), self.provider.frozen())

    def own(self, owned: OwnedProvider) -> None:
        self._owned = owned

    def serve(self, checkpointer: Checkpointer) -> None:
        self._order.prime()
        meet = (lambda: None) if self._owned is None else self._owned.meet
        self._iterations = Iterations(self.provider, checkpointer, meet=meet)
        checkpointer.on_end_iteration(self._said)
        checkpointer.on_close(self._end_joint_step)
        checkpointer.on_close(self._iterations.over)
        checkpointer.on_end(self.remove)
        for each in self._step_hooks.values():
            checkpointer.on_end(each.warn_of_the_next_step)
        if checkpointer.version > 0:
            self._form_pass = FormPass(lambda: dict(self._model.named_buffers()))
        self._checkpointer = checkpointer

    def remove(self) -> None:
        self._order.remove()
        for each in self._step_hooks.values():
            each.remove()
        remove(self._forward_hooks)
        remove(self._part_hooks)
        self.provider.beside.let_go()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Returns the step's arguments, if they are to be others."""
        checkpointer, iterations = self._checkpointer, self._iterations
        if checkpointer is None or iterations is None:
            return None  # a step that is replayed
        self._step_hooks[optimizer].check()

        def take() -> None:
            self._take_gradients(optimizer, checkpointer, iterations)

        self._closure = Closure.of(optimizer, args, kwargs, take)
        if self._closure is not None:
            return self._closure.instead(args, kwargs)
        take()
        return None

    def _take_gradients(
        self, optimizer: torch.optim.Optimizer, checkpointer: Checkpointer, iterations: Iterations
    ) -> None:
        """They are those of the step that comes now."""
        if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            raise UnsupportedSetup(
                "under a GradScaler a fused optimizer unscales gradients, and skips, inside its step, where neither "
                "can be seen; supported is an optimizer with fused=False"
            )
        refuse_forgotten_scheduler((optimizer,), self._scheduler, self.provider.beside)
        if not self._has_stepped:
            refuse_schedulers_held_elsewhere([*self._step_hooks], self._scheduler, self.provider.beside)
            self._has_stepped = True
        refuse_forgotten_scaler(self.provider.beside)
        self._later_hooks.refuse()
        iterations.step_comes()
        gradients = self.provider.gradients()
        if self._joint is not None:
            gradients = self._joint.of(optimizer, gradients)
        self.provider.after_loss.measure(gradients)
        if self._owned is not None:
            self._parallel.check_step()
            gradients = self._owned.before_step(gradients)
        version = checkpointer.version + 1
        self.provider.after_loss.raise_rate(self._optimizer.param_groups, version)
        checkpointer.capture(version, gradients)
        self._repeatability.before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checkpointer is None:
            return
        self._form_pass = None
        if self._closure is not None:
            closure, self._closure = self._closure, None  # it holds a batch
            closure.check_called()
        if self._repeatability.is_lost():
            self._checkpointer.cannot_be_replayed()
        if self._owned is not None:
            self._owned.stepped()
        if self._joint is None:
            self._end_step()
        else:
            self.provider.after_loss.lower_rate(self._optimizer.param_groups, done=False)
            self._joint.stepped(optimizer)
            self._checkpointer.part_stepped()

    def _said(self, ends_epoch: bool) -> None:
        """The loop says that its iteration is over, and perhaps an epoch with it."""
        self._end_joint_step()
        if self._iterations is not None:
            self._iterations.said(ends_epoch)

    def _end_joint_step(self) -> None:
        if self._joint is not None and self._joint.end():
            self._end_step()

    def _end_step(self) -> None:
        self.provider.after_loss.lower_rate(self._optimizer.param_groups)
        self.provider.kept_gradients.stepped()
        if self._checkpointer is not None and self._iterations is not None:
            if self._repeatability.is_unfinished():
                self._checkpointer.cannot_be_replayed()
            self._iterations.stepped(self._checkpointer.version + 1)

    def _before_calls_of(
        self, modules: Iterable[torch.nn.Module], hook: Callable[[torch.nn.Module, tuple[Any, ...]], None]
    ) -> list[RemovableHandle]:
        modules = list(modules)
        if scripted := next((each for each in modules if isinstance(each, torch.jit.ScriptModule)), None):
            raise UnsupportedSetup(
                f"{type(scripted).__name__} is made by torch.jit, which takes no hooks: attach the module that it was "
                "made of, or compile it by torch.compile"
            )
        outside, beside, compiled = uncompiled(hook), unless_compiled(hook), compiled_parts(self._model)
        return [
            each.register_forward_pre_hook(beside if each in compiled else outside, prepend=self.provider.gathers)
            for each in modules
        ]

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if model not in self._modules:
            return  # a shallow copy, which shares the hooks of what it was copied from
        if self._form_pass is not None:
            self._form_pass.forward()
        self._stand_next_to_the_steps()
        if self._iterations is not None and model.training:
            self.provider.kept_gradients.forward()
            if not self._iterations.begun:
                remove(self._part_hooks)
            self._iterations.forward()
            self._parallel.forward()

    def _stand_next_to_the_steps(self) -> None:
        for each in self._step_hooks.values():
            each.stand_next_to_the_step()

    def _before_part(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Of a model that was not called itself: else this hook is gone, or the iteration has begun."""
        if self._iterations is None or not module.training or module not in self._modules:
            return
        if self._form_pass is not None:
            self._form_pass.forward()
        if not self._iterations.begun:
            self._stand_next_to_the_steps()
            self.provider.kept_gradients.forward()
            self._iterations.forward()
        self._parallel.forward()


def remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def compiled_parts(model: torch.nn.Module) -> frozenset[torch.nn.Module]:
    """What is within a module that ``torch.compile`` has made: a hook there would break its graph, which the wrapper's
    own hook stands before."""
    made = (each for each in model.modules() if hasattr(each, "_orig_mod"))
    return frozenset(part for each in made for part in each.modules() if part is not each)


def called_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose call begins a forward pass: the model, or, if it is a mere container, those in it."""
    # torch.compile gives its wrapper one of its own.
    forward = vars(model).get("forward", getattr(type(model), "forward", None))
    if forward is not None and forward is not torch.nn.Module.forward:
        yield model
    else:
        for child in model.children():
            yield from called_modules(child)

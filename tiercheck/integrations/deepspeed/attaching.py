"""DeepSpeed: ZeRO 0 to 3 in fp32, bf16 and fp16, pipelines included, by one line after ``deepspeed.initialize``.

::

    engine, *_ = deepspeed.initialize(model=model, config=config)
    checkpointer = attach(engine, Hierarchy.of("shm://my-run", "nvme:///shared/my-run?survives=rack"))
    while engine.global_steps < steps:
        ...                      # the loop stays as it is

or by a block in the DeepSpeed JSON, when ``attach(engine)`` is enough::

    "tiercheck": {"tiers": ["shm://my-run", "nvme:///shared/my-run?survives=rack"], "base_every": 100}

A version is DeepSpeed's ``global_steps``. It is published before ``engine.step()`` returns, or, with ``stateful`` or
``after_step``, at the end of its iteration: when the loop calls ``checkpointer.end_iteration()``, or else when the next
forward pass of training begins (:mod:`tiercheck.streams.tensors.beside`), and of a pipeline when the next
``train_batch`` does (:mod:`tiercheck.integrations.deepspeed.calls`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.forgotten import (
    refuse_forgotten_scheduler,
    refuse_schedulers_held_elsewhere,
    scheduled_wrappers,
)
from tiercheck.integrations.hooks import StepHooks, attach_hooks, uncompiled
from tiercheck.integrations.iterations import Iterations
from tiercheck.integrations.repeatability import Repeatability
from tiercheck.integrations.replicas import Alike
from tiercheck.policy.policies import Policies
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.request import Request
from tiercheck.runtime.group import Group, TorchGroup
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.beside import Beside, End
from tiercheck.streams.tensors.owned import OwnedProvider

try:
    from tiercheck.integrations.deepspeed.calls import after_step, before_train_batch
    from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
    from tiercheck.integrations.deepspeed.replicated import EngineReplicas
    from tiercheck.integrations.deepspeed.support import refuse_ranks_that_share_parameters
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "deepspeed":
        raise
    raise ModuleNotFoundError(
        "tiercheck.integrations.deepspeed needs DeepSpeed: pip install 'tiercheck[deepspeed]'", name="deepspeed"
    ) from error

__all__ = ["attach"]

BLOCK = "tiercheck"
REQUEST = [each.name for each in fields(Request)]


def attach(
    engine: Any,
    hierarchy: Hierarchy | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    after_step: Mapping[str, Any] | None = None,
    config: CheckpointConfig | None = None,
    policies: Policies | None = None,
    group: Group | None = None,
    version: int | None = None,
    generation: int | None = None,
    fresh: bool = False,
    loading: Loading | None = None,
    on_lost_stage: LostStage | str | None = None,
) -> Checkpointer:
    """Restore the newest version into the engine, then save every one that follows. Collective.

    Without ``hierarchy`` the ``"tiercheck"`` block of the engine's configuration is read: ``tiers`` (fastest first,
    each a URL, or an object with the fields ``url``, ``name`` and ``codec`` of a :class:`~tiercheck.hierarchy.Tier`),
    ``must_survive``, ``version``, ``generation`` and ``fresh``, ``loading`` (an object with ``missing`` and
    ``unexpected``), ``on_lost_stage`` (a method's name, or an object with the fields of :class:`LostStage`), and the
    fields of :class:`CheckpointConfig`.
    ``stateful`` and ``after_step`` are as for :func:`tiercheck.integrations.torch.attach`: data loaders, averages,
    counters; so are ``version``, ``generation``, ``fresh`` and ``loading``, which count before the block.
    ``on_lost_stage``: what is done if no copy of a stage of the pipeline is left, such as ``"neighbours"``; by default
    the start is refused. With it each version also holds the norms of the gradients. Errors:
    ``UnsupportedSetup`` for an engine whose state cannot be saved whole, or with ``train_on_compressed`` one whose
    ranks share parameters (tensor parallelism, tied layers); ``ConfigurationError``; those of :class:`Checkpointer`.
    """
    request = Request(version, generation, fresh)
    if hierarchy is None:
        if config is not None:
            raise ConfigurationError("config= goes with hierarchy=; without them the engine's tiercheck block is read")
        hierarchy, config, in_block, loading_in_block, lost_in_block = _read(engine.config)
        request, loading = request or in_block, loading or loading_in_block
        on_lost_stage = lost_in_block if on_lost_stage is None else on_lost_stage
    lost = None if on_lost_stage is None else LostStage.of(on_lost_stage)

    made: list[_Hooks] = []

    def hook() -> _Hooks:
        beside = Beside(after_step, stateful)
        provider = DeepSpeedProvider(engine, beside)
        if lost is not None:
            provider.measure_norms()
        optimizers = chain((provider.optimizer,), scheduled_wrappers(provider.optimizer))
        refuse_forgotten_scheduler(optimizers, engine.lr_scheduler, beside)
        if config is not None and config.train_on_compressed:
            refuse_ranks_that_share_parameters(engine)
        made.append(_Hooks(provider, engine, in_step=stateful is None and after_step is None))
        return made[0]

    ranks = group or TorchGroup(deadline_s=(config or CheckpointConfig()).deadline_s)
    return attach_hooks(
        hook,
        hierarchy,
        ranks,
        config,
        policies,
        request,
        loading,
        replicating=lambda: made[0],
        stage=lambda: made[0].provider.stage(),
        on_lost_stage=lost,
    )


def read_block(config: Mapping[str, Any] | str | Path) -> tuple[Hierarchy, CheckpointConfig]:
    """The hierarchy and configuration in the ``"tiercheck"`` block of a DeepSpeed configuration or of its file.

    Errors: ``ConfigurationError`` if the block is missing, or has an unknown key or a wrong type.
    """
    hierarchy, options, *_ = _read(config)
    return hierarchy, options


def _read(
    config: Mapping[str, Any] | str | Path,
) -> tuple[Hierarchy, CheckpointConfig, Request, Loading, LostStage | None]:
    """As :func:`read_block`, and what the block asks for and allows."""
    if not isinstance(config, Mapping):
        config = json.loads(Path(config).read_text())
    block = config.get(BLOCK) if isinstance(config, Mapping) else None
    if not isinstance(block, Mapping):
        raise ConfigurationError(
            f'attach needs hierarchy=, or a "{BLOCK}" block in the DeepSpeed configuration, such as '
            f'"{BLOCK}": {{"tiers": ["shm://my-run", "nvme:///shared/my-run?survives=rack"]}}'
        )
    options = dict(block)
    tiers = options.pop("tiers", None)
    if not isinstance(tiers, list):
        raise ConfigurationError(f'"tiers" in the "{BLOCK}" block must be a list of tier URLs, not {tiers!r}')
    must_survive = options.pop("must_survive", "nothing")
    if not isinstance(must_survive, str):
        raise ConfigurationError(f'"must_survive" in the "{BLOCK}" block must be a string, not {must_survive!r}')
    hierarchy = Hierarchy.of(*map(_tier_of, tiers), must_survive=must_survive)
    request = Request(**{name: options.pop(name) for name in REQUEST if name in options})
    loading = options.pop("loading", {})
    if not isinstance(loading, Mapping):
        raise ConfigurationError(f'"loading" in the "{BLOCK}" block must be an object, not {loading!r}')
    lost = options.pop("on_lost_stage", None)
    found = None if lost is None else LostStage.of(lost)
    return hierarchy, CheckpointConfig.from_mapping(options), request, Loading.from_mapping(loading), found


def _tier_of(given: object) -> Tier:
    """One of the ``tiers`` in the block: a URL, or an object with the fields of a :class:`Tier`."""
    fields = {"url": given} if isinstance(given, str) else given
    strings = isinstance(fields, Mapping) and all(isinstance(each, str) for pair in fields.items() for each in pair)
    if (
        not isinstance(fields, Mapping)
        or not strings
        or "url" not in fields
        or fields.keys() - {"url", "name", "codec"}
    ):
        raise ConfigurationError(
            f'each of the "tiers" in the "{BLOCK}" block must be a URL, or an object with the fields "url", "name" and '
            f'"codec", of which "url" must be there; not {given!r}'
        )
    return Tier(**fields)


class _Hooks:
    """From the hooks of the inner optimizer to the checkpointer. One iteration may step it in several calls."""

    def __init__(self, provider: DeepSpeedProvider, engine: Any, *, in_step: bool) -> None:
        self.provider = provider
        self._engine = engine
        self._in_step = in_step
        self._replicas = EngineReplicas(engine)
        self._owned: OwnedProvider | None = None
        self._checkpointer: Checkpointer | None = None
        self._iterations: Iterations | None = None
        self._visited: set[str] = set()
        self._has_stepped = False
        self._skipped_steps = 0
        self._repeatability = Repeatability()
        self._step_hooks = StepHooks(provider.optimizer, self._before_step, self._after_step)
        self._forward_hook = provider.called.register_forward_pre_hook(uncompiled(self._before_forward))
        self._forget_calls = after_step(engine, self._step_returns), before_train_batch(engine, self._iteration_begins)

    def caveats(self) -> list[str]:
        return [*self.provider.beside.caveats(), *self.provider.extra_state.caveats()]

    def alike(self) -> Alike:
        return self._replicas.alike(self.provider)

    def own(self, owned: OwnedProvider) -> None:
        self._owned = owned

    def serve(self, checkpointer: Checkpointer) -> None:
        meet = (lambda: None) if self._owned is None else self._owned.meet
        self._iterations = Iterations(
            self.provider, checkpointer, in_step=self._in_step, meet=meet, moved=self.provider.behind_step.moved
        )
        checkpointer.on_end_iteration(self._said)
        checkpointer.on_close(self._iterations.over)
        checkpointer.on_close(self._record_skipped)
        checkpointer.on_end(self.remove)
        checkpointer.on_end(self._step_hooks.warn_of_the_next_step)
        self._skipped_steps = self.provider.skipped_steps()
        self._checkpointer = checkpointer

    def remove(self) -> None:
        self._step_hooks.remove()
        self._forward_hook.remove()
        for forget in reversed(self._forget_calls):
            forget()
        self.provider.beside.let_go()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checkpointer is None or self._iterations is None or self.provider.replaying:
            return
        self._step_hooks.check()
        if not self._has_stepped:
            held = [optimizer, self._engine.optimizer]
            refuse_schedulers_held_elsewhere(held, self._engine.lr_scheduler, self.provider.beside)
            self._has_stepped = True
        if not self._visited:
            with self.provider.between_iterations():
                self._iterations.step_comes()
            self._record_skipped()
            self.provider.after_loss.raise_rate(self.provider.groups(), self.provider.version)
        self._visited |= self.provider.visited_in_hook(optimizer)
        gradients = self.provider.gradients_in_hook(optimizer)
        self.provider.after_loss.measure(gradients)
        if self._owned is not None:
            self._replicas.check_step()
            gradients = self._owned.before_step(gradients)
        self._checkpointer.capture(self.provider.version, gradients)
        self._repeatability.before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checkpointer is not None and self._repeatability.is_lost():
            self._checkpointer.cannot_be_replayed()
        if self._iterations is not None and self._visited and self._visited >= self.provider.expected():
            self._visited.clear()
            self.provider.after_loss.lower_rate(self.provider.groups())
            if self._owned is not None:
                self._owned.stepped()
            self._iterations.stepped(self.provider.version)

    def _step_returns(self) -> None:
        if self._iterations is not None and self._iterations.in_step:
            if self._record_skipped(End.SAID):  # all of it is as of now, as after a step that was made
                self._iterations.skipped()
            self.provider.behind_step.mark()

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.provider.forward_begins()
        self._step_hooks.stand_next_to_the_step()
        if self.provider.training:
            self._iteration_begins()
            self._replicas.forward()

    def _iteration_begins(self) -> None:
        """Or goes on: each micro-batch has a forward pass."""
        if self._iterations is None or self._visited:
            return
        self._iterations.over(End.FORWARD)
        self._record_skipped()
        self._iterations.forward()

    def _said(self, ends_epoch: bool) -> None:
        """The loop says that its iteration is over, and perhaps an epoch with it."""
        if self._iterations is not None:
            self._iterations.said(ends_epoch)
            if self._record_skipped(End.SAID):
                self._iterations.skipped()

    def _record_skipped(self, end: End = End.UNSEEN) -> bool:
        """Versions whose gradients were not finite end without a step, and no hook of the optimizer sees them. Returns
        whether there was one."""
        if self._checkpointer is None:
            return False
        skipped = self.provider.skipped_after(self._checkpointer.version, self._skipped_steps)
        for version in skipped:
            if end is not End.SAID:
                self.provider.beside.skipped()
            with self.provider.between_iterations():
                self._checkpointer.skip(version)
            self.provider.published()
        self._skipped_steps = self.provider.skipped_steps()
        return bool(skipped)

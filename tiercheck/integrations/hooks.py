"""Hooks of an optimizer's step that nobody comes between, and what every integration does with its hooks."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.callers import callers
from tiercheck.integrations.replicas import Alike, share_out
from tiercheck.policy.policies import Policies
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.request import Request
from tiercheck.recovery.ranks import gather
from tiercheck.runtime.front import run
from tiercheck.runtime.group import BlockingGroup, Group
from tiercheck.streams.device.cuda import refuse_capture
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.owned import OwnedProvider
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.stage import PipelineStage

__all__ = [
    "Arguments",
    "Hooks",
    "Replicating",
    "StepHooks",
    "attach_hooks",
    "attached",
    "uncompiled",
    "unless_compiled",
]

log = logging.getLogger(__name__)

_attached = threading.local()
"""Of each thread, the checkpointers that were attached in it: the ranks of a simulated group have one each."""

_warnings: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""Of optimizers whose checkpointer is closed, the hook that tells of the next step."""

T = TypeVar("T")
OUTSIDE = (
    "a TierCheck checkpointer is attached to what is compiled, and has to see each forward pass and step: attach to "
    "what torch.compile returns, or leave fullgraph=True out"
)
Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a step: the optimizer comes first."""
Before = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""May return other arguments."""

_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__
"""Of what torch wraps the ``step`` of each class of optimizers in, to call the hooks."""


class StepHooks:
    """Two hooks around the optimizer's step. ``before`` is the last pre-hook that runs, ``after`` the first post-hook.

    If another hook ran in between, its changes would be in no record. torch runs hooks in the order in which they were
    registered, and has no public way to change that order. It runs them once more if a class's ``step`` calls that of
    its base class: the outermost step is the one that a replay makes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Before, after: Hook) -> None:
        if (warning := _warnings.pop(optimizer, None)) is not None:
            warning.remove()
        self._optimizer = optimizer
        self._before = optimizer.register_step_pre_hook(uncompiled(outermost(before)))
        self._after = optimizer.register_step_post_hook(uncompiled(outermost(after)))
        self._befores = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        self._afters = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        self.stand_next_to_the_step()

    def stand_next_to_the_step(self) -> None:
        """Pass the hooks that were registered since."""
        self._befores.move_to_end(self._before.id)
        self._afters.move_to_end(self._after.id, last=False)

    def check(self) -> None:
        """Called by ``before``. Errors: ``UnsupportedSetup`` if a hook was registered since, or the step is compiled or
        being captured into a CUDA graph."""
        refuse_capture()
        refuse_compiled()
        if next(reversed(self._befores)) != self._before.id:
            raise UnsupportedSetup(
                "a step pre-hook was registered on the optimizer between the forward pass and the step, and what it "
                "does to the gradients would not be recorded: register it before the forward pass"
            )

    def remove(self) -> None:
        self._before.remove()
        self._after.remove()

    def warn_of_the_next_step(self) -> None:
        """The checkpointer is closed. Whoever trains on all the same is told so at the next step, once."""

        def warn(*_: object) -> None:
            handle.remove()
            log.warning(
                "the optimizer steps, but its checkpointer is closed: this step and those after it are saved nowhere; "
                "close it after the last step, or attach again"
            )

        handle = _warnings[self._optimizer] = self._optimizer.register_step_pre_hook(uncompiled(warn))


def outermost(hook: Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], T]) -> Callable[..., T | None]:
    """The hook, which is not called for a step within a step of the same optimizer."""

    def called(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T | None:
        steps = sum(frame.f_code is _CALLS_HOOKS and frame.f_locals["self"] is optimizer for frame in callers())
        return hook(optimizer, args, kwargs) if steps < 2 else None

    return called


def uncompiled(hook: Callable[..., T]) -> Callable[..., T]:
    """The hook, into which ``torch.compile`` does not look: a graph breaks there. What a hook does is no part of the
    model, and Dynamo, which would compile it, fails at it. The first optimizer has imported what this takes. In a copy
    of what it is registered on it does nothing."""
    return _HereAlone(torch.compiler.disable(hook, reason=OUTSIDE))  # type: ignore[no-untyped-call]


def unless_compiled(hook: Callable[..., Any]) -> Callable[..., None]:
    """The hook, which is left out of what ``torch.compile`` makes a graph of: none breaks there. So is what it does: it
    suits parts of a module that was compiled as a whole, whose own hook comes before."""
    outside = torch.compiler.disable(hook, reason=OUTSIDE)  # type: ignore[no-untyped-call]

    def unless(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            outside(*args)

    return _HereAlone(unless)


class _HereAlone:
    """A hook on what this process trains. It is pickled, as by ``torch.save(model)``, and copied as one that does
    nothing: no process could load it, and nothing of a copy is saved."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self.__name__ = hook.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_exporting() else self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _hook_of_a_copy, ()


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def refuse_compiled() -> None:
    """Called in the optimizer's step. Errors: ``UnsupportedSetup`` if ``torch.compile`` has compiled what makes it, and
    so the step's arithmetic, which a replay would not have: it calls the optimizer, or a kernel with its bits."""
    wrapper = next((frame for frame in callers() if frame.f_code.co_name == "compile_wrapper"), None)
    if wrapper is not None and wrapper.f_globals.get("__name__") == "torch._dynamo.eval_frame":
        raise UnsupportedSetup(
            "optimizer.step() is called within what torch.compile compiles, so that its arithmetic is another than a "
            "replay's: compile the model, or the loss, and call optimizer.step() outside of it"
        )


class Hooks(Protocol):
    """An integration's hooks on one model and optimizer. They do nothing before :meth:`serve`."""

    @property
    def provider(self) -> StateProvider: ...

    def caveats(self) -> Sequence[str]:
        """Why what is trained after a recovery would not have the bits of an uninterrupted run. Asked once the state is
        restored."""

    def serve(self, checkpointer: Checkpointer) -> None:
        """From here on every step is a version. All ranks are attached then."""

    def remove(self) -> None:
        """Take the hooks away."""


class Replicating(Protocol):
    """Hooks of a framework that keeps tensors alike on all ranks."""

    def alike(self) -> Alike:
        """Which ones. Collective."""

    def own(self, owned: OwnedProvider) -> None:
        """This rank stores what is ``owned``. Called before :meth:`Hooks.serve`; if it is not called, all of it."""


def attach_hooks(
    hook: Callable[[], Hooks],
    hierarchy: Hierarchy,
    group: Group,
    config: CheckpointConfig | None,
    policies: Policies | None = None,
    request: Request | None = None,
    loading: Loading | None = None,
    replicating: Callable[[], Replicating] | None = None,
    stage: Callable[[], PipelineStage | None] = lambda: None,
    on_lost_stage: LostStage | None = None,
) -> Checkpointer:
    """A checkpointer, and the hooks that ``hook`` makes, which serve it. Collective.

    ``hook`` looks at the model and the optimizer, and refuses them on every rank if one rank's cannot be saved,
    before a tier is touched. ``replicating``: the hooks that it has made, if what ranks hold alike may be
    stored by one of them. ``stage``: this rank's, of a pipeline; ``on_lost_stage``: as of
    :class:`Checkpointer`. Whatever fails, no hook stays. Errors: those of ``hook`` and of :class:`Checkpointer`.
    """
    made: list[Hooks] = []

    def look() -> None:
        refuse_another()
        made.append(hook())

    settings = config if isinstance(config, CheckpointConfig) else CheckpointConfig()
    deadline_s = settings.deadline_s
    try:
        run(gather(BlockingGroup(group), "looking at the model and its optimizer", look, deadline_s=deadline_s))
        hooks = made[0]
        owned: OwnedProvider | None = None
        if replicating is not None:
            owned = share_out(hooks.provider, replicating().alike, hierarchy, group, settings)
        if replicating is not None and owned is not None:
            replicating().own(owned)
        checkpointer = Checkpointer(
            hooks.provider if owned is None else owned,
            hierarchy,
            group=group,
            config=config,
            policies=policies,
            request=request,
            loading=loading,
            caveats=hooks.caveats,
            before_bases=None if owned is None else owned.compare,
            stage=stage(),
            on_lost_stage=on_lost_stage,
        )
        try:
            hooks.serve(checkpointer)
        except BaseException:
            checkpointer.abort()
            raise
    except BaseException:
        for each in made:
            each.remove()
        group.close()
        raise
    live = vars(_attached).setdefault("live", weakref.WeakSet())
    live.add(checkpointer)
    checkpointer.on_end(lambda: live.discard(checkpointer))
    return checkpointer


def attached() -> list[Checkpointer]:
    """The checkpointers that were attached in this thread and are not closed."""
    return list(vars(_attached).get("live", ()))


def _leave_to_parent() -> None:
    """What a forked child inherits stays the parent's; a model of its own it may attach."""
    vars(_attached).clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def refuse_another() -> None:
    """Errors: ``UnsupportedSetup`` while another checkpointer is attached: the random generators are one of the state
    of both, and each would put back its own."""
    if attached():
        raise UnsupportedSetup(
            "a checkpointer is attached in this process already, and both would save and put back the same random "
            "generators: close it first. Several models with an optimizer each, as of a GAN, are attached together: "
            "attach(ModuleDict({...}), [one, other], ...)"
        )

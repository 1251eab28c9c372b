"""What a copy must hold to be of the state that a job trains.

Checksums say that bytes are the bytes written; they do not say that a sane writer wrote them. So everything that a copy
says is compared with the live state before anything of it is used: names, dtypes, shapes, options and the form of the
host state. What differs makes a failed copy (``Corruption``), and another one is read. A copy of another model is no
damage: :func:`check_identity` refuses it as ``Mismatch``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiercheck.errors import Corruption, Mismatch
from tiercheck.format.container import TensorSpec
from tiercheck.streams.codecs import Encoding
from tiercheck.streams.records.base import BaseState
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.tensors.as_bytes import DTYPES
from tiercheck.streams.tensors.provider import Form, Identity, StateProvider, extras_of, forms_of, shown_form
from tiercheck.streams.tensors.stage import NORMS
from tiercheck.types import shown

__all__ = ["Expected"]

LIKE_THE_MASTER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev")
)
"""What torch's optimizers, and those made after them, keep in the shape of each master."""
NEEDED = dict.fromkeys(
    ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW"), frozenset(("step", "exp_avg", "exp_avg_sq"))
)
"""By optimizer, what it holds of a tensor as soon as it holds anything."""
OPTIONS = frozenset({
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "foreach",
    "fused", "capturable", "differentiable", "decoupled_weight_decay",
})  # fmt: skip
"""Of a parameter group's options, those that torch's optimizers read, and a replay. What becomes of any other one while
a job trains is the user's affair; and another version of torch has other ones."""
OPTIONS_HELD = frozenset(("options", "hyperparameters"))
"""Where a host state may hold the options of each parameter group."""
OWN = frozenset(("counters", "loss_scale"))
"""Of the host state, what frameworks make beside options and generators; the rest comes from objects of the user's."""


@dataclass(frozen=True)
class Expected:
    """The live state, described. Errors of all methods: ``Corruption``, unless they say otherwise."""

    identity: Identity
    masters: Mapping[str, Form]
    state: Mapping[str, Mapping[str, Form]]
    """What the optimizer holds already: most hold nothing before their first step."""
    extras: Mapping[str, Form]
    buffers: Mapping[str, Form]
    options: Sequence[Mapping[str, Any]]
    host_state: Mapping[str, Any]

    @classmethod
    def of(cls, provider: StateProvider) -> Expected:
        held = provider.optimizer_state()
        tensors = {name: {k: v for k, v in each.items() if isinstance(v, torch.Tensor)} for name, each in held.items()}
        return cls(
            identity=provider.identity(),
            masters=forms_of(provider.masters()),
            state={name: forms_of(each) for name, each in tensors.items()},
            extras=forms_of(extras_of(provider)),
            buffers=forms_of(provider.buffers()),
            options=provider.hyperparameters(),
            host_state=provider.host_state(),
        )

    @classmethod
    def of_base(cls, base: BaseState) -> Expected:
        """The same of a base, if there is no live state. Of the host state nothing is known then."""
        extras = forms_of(base.extras)
        options = base.hyperparameters if isinstance(base.hyperparameters, list) else []
        return cls(base.identity, forms_of(base.masters), {}, extras, extras, options, {})

    def check_identity(self, base: BaseState, places: str) -> None:
        """Errors: ``Mismatch`` naming both set-ups, optimizers, or the first tensor in which the models differ."""
        saved, here = base.identity, self.identity
        for what, before, now in (
            ("a training set-up", saved.framework, here.framework),
            ("an optimizer", saved.optimizer.kind, here.optimizer.kind),
        ):
            if before != now:
                raise Mismatch(
                    f"the checkpoint in {places} is of {what} {before}, this job has {now}: "
                    "resume with the same one, or use another place"
                )
        if saved.model != here.model:
            raise Mismatch(
                f"the checkpoint in {places} is of another model: {self._first_difference(base)} "
                f"({saved.model_summary} against {here.model_summary}); resume with the same one, or use another place"
            )

    def check_base(self, base: BaseState) -> None:
        """The base of a model that is this one, by :meth:`check_identity`."""
        check_same("trained tensor", self.masters, forms_of(base.masters))
        check_same("tensor", self.extras, forms_of(base.extras))
        for name, residual in base.residuals.items():
            wanted = (math.prod(self.masters[name][1]),) if name in self.masters else None  # they are flat
            if tuple(residual.shape) != wanted:
                raise Corruption(f"it has a residual for {name!r}, which the state does not have")
        for name, held in base.optimizer_state.items():
            if name not in self.masters:
                raise Corruption(f"it has the optimizer's state of {name!r}, which the state does not have")
            needed = NEEDED.get(self.identity.optimizer.kind, frozenset())
            if held and not needed <= held.keys():
                raise Corruption(f"the optimizer's state of {name!r} lacks {', '.join(sorted(needed - held.keys()))}")
            for key, value in held.items():
                self._check_optimizers(name, key, value)
        self._check_options(base.hyperparameters)
        self._check_host_state(base.host_state)

    def check_differential(self, differential: Differential) -> None:
        version = differential.version
        for name, description in differential.encodings.items():
            encoding = Encoding.from_object(description)
            dtype, shape = self.masters.get(name, (None, ()))
            if dtype is None or encoding.shape != shape:
                raise Corruption(f"version {version} has a gradient for {name!r} {encoding.shape}, and no such tensor")
            kind = DTYPES.get(encoding.dtype)
            if kind != dtype and not (kind is not None and kind.is_floating_point and dtype.is_floating_point):
                raise Corruption(f"version {version} has a gradient of dtype {encoding.dtype} for {name!r}, a {dtype}")
        for spec in differential.buffer_specs():
            self._check_buffer(version, spec)
        if not differential.skipped:
            self._check_options(differential.hyperparameters)
        self._check_host_state(differential.host_state)

    def _check_buffer(self, version: int, spec: TensorSpec) -> None:
        if self.buffers.get(spec.name) != (DTYPES.get(spec.dtype), spec.shape):
            raise Corruption(
                f"version {version} has a buffer {spec.name!r} {spec.shape} of {spec.dtype}, which the state has not"
            )

    def _check_optimizers(self, name: str, key: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            if value is not None and not isinstance(value, bool | int | float | str | list | tuple | dict):
                raise Corruption(f"the optimizer's {key!r} of {name!r} is a {type(value).__name__}")
            return
        found, here = (value.dtype, tuple(value.shape)), self.state.get(name, {}).get(key)
        wanted = here[1] if here is not None else self.masters[name][1] if key in LIKE_THE_MASTER else None
        if wanted is not None and found[1] != wanted:
            raise Corruption(f"the optimizer's {key!r} of {name!r} is {found[1]}, not {wanted}")
        if key == "step" and value.numel() != 1:
            raise Corruption(f"the optimizer's {key!r} of {name!r} has {value.numel()} elements")

    def _check_options(self, options: Any) -> None:
        if not isinstance(options, list) or len(options) != len(self.options):
            raise Corruption(f"it has options for {counted(options)} parameter groups, not {len(self.options)}")
        for index, (here, saved) in enumerate(zip(self.options, options, strict=True)):
            if not isinstance(saved, dict) or not all(isinstance(key, str) for key in saved):
                raise Corruption(f"the options of parameter group {index} are no options")
            if "lr" in here and "lr" not in saved:
                raise Corruption(f"the options of parameter group {index} lack lr")
            for key in sorted(OPTIONS & here.keys() & saved.keys()):
                value, before = here[key], saved[key]
                if not alike(value, before) and (key, value) != ("lr", None):  # some optimizers find one themselves
                    raise Corruption(
                        f"{key} of parameter group {index} is {shown(before)}, which is nothing like {shown(value)}"
                    )

    def _check_host_state(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise Corruption(f"its host state is a {type(found).__name__}")
        for key, here in self.host_state.items():
            saved = found.get(key)
            if key == NORMS and saved is None:
                continue  # they are measured only for jobs that ask for it, and a job may ask later
            if isinstance(here, dict) and not isinstance(saved, dict):
                raise Corruption(f"its host state has a {type(saved).__name__} for {key!r}")
            if key in OPTIONS_HELD and self._are_options(here):
                self._check_options(saved)
            if not self._fits(key, here, saved) and self._fits(key, here, here):
                raise Corruption(f"its host state has something else for {key!r} than such a job saves")

    def _are_options(self, here: Any) -> bool:
        """Whether the live host state holds the options of each parameter group there."""
        known = isinstance(here, list) and len(here) == len(self.options)
        return known and all(isinstance(each, dict) for each in here)

    def _fits(self, key: str, here: Any, saved: Any) -> bool:
        """Whether ``saved`` has the form that the integrations of this project give to what they call so. Another
        integration's state may be of another form, which its live state does not fit either."""
        if key == "random":
            return alike_generators(here, saved)
        if key == "next":
            return alike_following(self.host_state.get("random"), saved)
        return key not in OWN or alike(here, saved, exactly=True)

    def _first_difference(self, base: BaseState) -> str:
        """The first tensor that the saved model and this one do not share, in words."""
        before, now = forms_of({**base.masters, **base.extras}), {**self.masters, **self.extras}
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                return f"{name} was {shown_form(before.get(name))}, and is {shown_form(now.get(name))} here"
        return "the names or dtypes of its parameters differ, or which of their pieces this rank holds"


def check_same(what: str, here: Mapping[str, Form], found: Mapping[str, Form]) -> None:
    for name in {**here, **found}:
        if here.get(name) != found.get(name):
            raise Corruption(
                f"its {what} {name!r} is {found.get(name, 'missing')}, and the model that it says it is of has "
                f"{here.get(name, 'none')}"
            )


def counted(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else f"a {type(value).__name__} of"


def alike_generators(here: Any, saved: Any) -> bool:
    """Whether both are of the same generators, whatever the number of GPUs: the job may have seen others."""
    if not isinstance(here, dict) or not isinstance(saved, dict):
        return False
    gpus, known = saved.get("cuda", []), here.get("cuda", [])
    rest = {kind: state for kind, state in here.items() if kind != "cuda"}
    return (
        alike(rest, saved, exactly=True)
        and isinstance(gpus, list)
        and all(alike(known[0], each, exactly=True) for each in gpus if known)
    )


def alike_following(here: Any, saved: Any) -> bool:
    """Whether it says what the next forward pass begins with: which generators are as they were, and the others'
    states."""
    if not isinstance(here, dict) or not isinstance(saved, dict):
        return False
    quiet, used = saved.get("quiet"), saved.get("used")
    if not isinstance(quiet, list) or not all(isinstance(kind, str) for kind in quiet):
        return False
    return isinstance(used, dict) and alike_generators({kind: here[kind] for kind in here.keys() & used.keys()}, used)


def alike(here: Any, saved: Any, *, exactly: bool = False) -> bool:
    """Whether a saved value may stand where ``here`` stands: of the same kind and, in containers, of the same form.

    ``exactly``: as in the state of a random generator, whose bytes have a length.
    """
    if here is None:
        return saved is None or isinstance(saved, bool) or (exactly and isinstance(saved, float))
    if saved is None:
        return isinstance(here, bool) or (exactly and isinstance(here, float))
    if isinstance(here, bool | np.bool_):
        return isinstance(saved, bool | np.bool_)
    if isinstance(here, int | float | np.number):
        return isinstance(saved, int | float | np.number) and not isinstance(saved, bool)
    if isinstance(here, np.ndarray) and here.ndim == 0:
        return isinstance(saved, int | float | np.number | np.ndarray) and np.ndim(saved) == 0
    if isinstance(here, np.ndarray):
        return isinstance(saved, np.ndarray) and saved.dtype == here.dtype and saved.shape == here.shape
    if isinstance(here, bytes):
        return isinstance(saved, bytes) and (not exactly or len(saved) == len(here))
    if isinstance(here, list | tuple):
        same = isinstance(saved, list | tuple) and len(saved) == len(here)
        return same and all(alike(a, b, exactly=exactly) for a, b in zip(here, saved, strict=True))
    if isinstance(here, dict):
        return isinstance(saved, dict) and all(
            key in saved and alike(value, saved[key], exactly=exactly) for key, value in here.items()
        )
    return type(saved) is type(here)

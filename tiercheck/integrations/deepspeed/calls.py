"""The calls of an engine's own methods that tell where an iteration is.

An iteration of a pipeline begins when the loop calls ``engine.train_batch``. The forward pass comes too late for what
the ranks do together at the end of an iteration. Inside ``train_batch`` each stage waits for the activations of the
stage before it. A stage that waited there for all others would wait for stages that wait for it. When the loop calls
``train_batch``, no stage waits for another one yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

__all__ = ["after_step", "before_train_batch"]


def before_train_batch(engine: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` whenever ``engine.train_batch`` is called. Returns what ends that. Of an engine that is no
    pipeline's nothing is changed."""
    return _around(engine, "train_batch", action, _nothing) if isinstance(engine, PipelineEngine) else _nothing


def after_step(engine: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` whenever ``engine.step`` has returned, of a pipeline ``engine.train_batch``. Returns what ends
    that."""
    method = "train_batch" if isinstance(engine, PipelineEngine) else "step"
    return _around(engine, method, _nothing, action)


def _nothing() -> None:
    pass


def _around(engine: Any, method: str, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """DeepSpeed has no hooks there, so the public method gets a wrapper, on this engine alone. A loop that took the
    method from the engine before does not call the wrapper."""
    wrapped = getattr(engine, method)
    own = method in vars(engine)  # somebody else has wrapped it on this engine
    actions = [(before, after)]

    @functools.wraps(wrapped)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for first, _ in actions:
            first()
        returned = wrapped(*args, **kwargs)
        for _, last in actions:
            last()
        return returned

    def remove() -> None:
        actions.clear()  # the wrapper stays if another one was put around it
        if vars(engine).get(method) is wrapper:
            if own:
                setattr(engine, method, wrapped)
            else:
                delattr(engine, method)

    setattr(engine, method, wrapper)
    return remove

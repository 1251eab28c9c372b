"""An iteration of a pipeline begins when the loop calls ``engine.train_batch``.

The forward pass comes too late for what the ranks do together at the end of an iteration. Inside ``train_batch`` each
stage waits for the activations of the stage before it. A stage that waited there for all others would wait for stages
that wait for it. When the loop calls ``train_batch``, no stage waits for another one yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

__all__ = ["before_train_batch"]


def before_train_batch(engine: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` whenever ``engine.train_batch`` is called. Returns what ends that. Of an engine that is no
    pipeline's nothing is changed.

    DeepSpeed has no hook there, so the public method gets a wrapper, on this engine alone. A loop that took the method
    from the engine before does not call the wrapper.
    """
    if not isinstance(engine, PipelineEngine):
        return lambda: None
    wrapped = engine.train_batch
    own = "train_batch" in vars(engine)  # somebody else has wrapped it on this engine
    actions = [action]

    @functools.wraps(wrapped)
    def train_batch(*args: Any, **kwargs: Any) -> Any:
        for each in actions:
            each()
        return wrapped(*args, **kwargs)

    def remove() -> None:
        actions.clear()  # the wrapper stays if another one was put around it
        if vars(engine).get("train_batch") is train_batch:
            if own:
                engine.train_batch = wrapped
            else:
                del engine.train_batch

    engine.train_batch = train_batch
    return remove

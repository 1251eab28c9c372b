"""Models that ``torch.compile`` compiles, and models of which a loop calls a method or parts instead of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.recovery.report import Fidelity

LAST = 9
Forward = Callable[[torch.Tensor], torch.Tensor]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(batch)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """As a model is called whose class has the training step."""
        return self.forward(batch).square().mean()


def loss_of(model: torch.nn.Module) -> Forward:
    return lambda batch: model(batch).square().mean()


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Traced by Dynamo, and run as it is."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def as_attached(model: Model) -> tuple[torch.nn.Module, Forward]:
    wrapped = compiled(model)
    return wrapped, loss_of(wrapped)


def without_breaks(model: Model) -> tuple[torch.nn.Module, Forward]:
    wrapped = torch.compile(model, backend="eager", fullgraph=True)
    return wrapped, loss_of(wrapped)  # type: ignore[arg-type, return-value]


def by_a_method_of_what_is_compiled(model: Model) -> tuple[torch.nn.Module, Forward]:
    wrapped: Any = torch.compile(model, backend="eager")
    return wrapped, wrapped.loss  # past the wrapper's own call


def beside_what_is_attached(model: Model) -> tuple[torch.nn.Module, Forward]:
    return model, loss_of(compiled(model))


def in_place(model: Model) -> tuple[torch.nn.Module, Forward]:
    model.compile(backend="eager")
    return model, loss_of(model)


def parts_of_it(model: Model) -> tuple[torch.nn.Module, Forward]:
    model.encoder.compile(backend="eager")
    return model, loss_of(model)


def loss_function(model: Model) -> tuple[torch.nn.Module, Forward]:
    return model, torch.compile(loss_of(model), backend="eager")


def by_a_method(model: Model) -> tuple[torch.nn.Module, Forward]:
    return model, model.loss


def by_its_parts(model: Model) -> tuple[torch.nn.Module, Forward]:
    return model, lambda batch: model.head(model.encoder(batch)).square().mean()


Way = Callable[[Model], tuple[torch.nn.Module, Forward]]
WAYS: list[Way] = [
    as_attached,
    without_breaks,
    by_a_method_of_what_is_compiled,
    beside_what_is_attached,
    in_place,
    parts_of_it,
    loss_function,
    by_a_method,
    by_its_parts,
]


def train(way: Way, last: int, url: str | None, *, says_end: bool) -> tuple[dict[int, str], Checkpointer | None]:
    """The losses from where the job stands. A loader is iterated over first, which draws a seed."""
    torch.manual_seed(3)
    model = Model()
    attached, loss = way(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = None
    if url is not None:
        config = CheckpointConfig(base_every=4, batch=2, deadline_s=30, bases="capture")
        checkpointer = attach(attached, optimizer, Hierarchy.of(url), config=config)
    first = 0 if checkpointer is None else checkpointer.version
    if first:
        torch.randn(1)  # what a resumed process draws, and the uninterrupted one does not
    losses: dict[int, str] = {}
    for version in range(first + 1, last + 1):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(version))
        value = loss(batch)
        losses[version] = value.item().hex()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if checkpointer is not None and says_end:
            checkpointer.end_iteration()
    return losses, checkpointer


@pytest.mark.parametrize("says_end", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_job_resumes_with_the_bits_of_one_that_did_not_fail(way: Way, says_end: bool) -> None:
    url = memory()
    before, checkpointer = train(way, 5, url, says_end=says_end)
    assert checkpointer is not None
    checkpointer.abort()
    after, checkpointer = train(way, LAST, url, says_end=says_end)
    assert checkpointer is not None
    assert checkpointer.recovery is not None
    assert checkpointer.recovery.fidelity is Fidelity.EXACT
    assert checkpointer.recovery.version == (5 if says_end else 4)
    checkpointer.abort()
    expected, _ = train(way, LAST, None, says_end=says_end)
    assert before | after == expected


def test_a_step_that_is_compiled_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = attach(model, optimizer, Hierarchy.of(memory()), config=CheckpointConfig(bases="capture"))
    model.loss(torch.ones(2, 4)).backward()
    step = torch.compile(optimizer.step, backend="eager")
    with pytest.raises(UnsupportedSetup, match=r"call optimizer\.step\(\) outside of it"):
        step()
    checkpointer.abort()


def hooks_in(model: torch.nn.Module) -> int:
    return sum(len(each._forward_pre_hooks) for each in model.modules())


def test_hooks_of_parts_go_when_the_model_itself_is_called() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = attach(model, optimizer, Hierarchy.of(memory()), config=CheckpointConfig(bases="capture"))
    everywhere = sum(1 for _ in model.modules())
    assert hooks_in(model) == everywhere
    model.eval()
    model(torch.ones(2, 4))
    assert hooks_in(model) == everywhere  # no forward pass of training
    model.train()
    model(torch.ones(2, 4))
    assert hooks_in(model) == 1
    checkpointer.abort()
    assert hooks_in(model) == 0


def test_a_copy_of_the_model_begins_no_iteration() -> None:
    """A teacher that was copied from the model after attach, and is called in training mode before its end."""
    url = memory()
    for _ in range(2):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpointer = attach(model, optimizer, Hierarchy.of(url), config=CheckpointConfig(bases="capture"))
        assert checkpointer.version == 0
        teacher = copy.deepcopy(model)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        teacher(torch.ones(2, 4))
        checkpointer.abort()


def test_a_validation_before_the_first_iteration_is_one_graph_too() -> None:
    """Of a compiled model no part has a hook that its graph would hold."""
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)])
    wrapped: Any = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.Adam(wrapped.parameters())
    checkpointer = attach(wrapped, optimizer, Hierarchy.of(memory()))
    wrapped.eval()
    with torch.no_grad():
        wrapped(torch.ones(3, 4))
    wrapped.train()
    wrapped(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    wrapped(torch.ones(3, 4))
    assert checkpointer.version == 1
    checkpointer.abort()

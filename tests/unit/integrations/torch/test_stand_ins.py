"""Forward passes of torch.func, of exports and of traces, in which others stand in for the model's tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.recovery.report import Fidelity

LAST = 7


class Model(torch.nn.Module):
    """With all that a look at a model meets: frozen parameters, buffers that change and that do not, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(4, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 1)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.frozen(self.dropout(self.encoder(batch)) * self.mask)))


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


def fake(model: torch.nn.Module, batch: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(batch))


Beside = Callable[[torch.nn.Module, torch.Tensor], object]
BESIDE: dict[str, Beside] = {
    "functional_call": lambda model, batch: functional_call(model, tensors(model), (batch,)),
    "grad": lambda model, batch: grad(lambda own: functional_call(model, own, (batch,)).sum())(tensors(model)),
    "jacrev": lambda model, batch: jacrev(model)(batch),
    "jacfwd": lambda model, batch: jacfwd(model, randomness="same")(batch),
    "hessian": lambda model, batch: jacfwd(jacrev(lambda point: model(point).sum()), randomness="same")(batch),
    "jvp": lambda model, batch: jvp(model, (batch,), (batch,)),
    "vjp": lambda model, batch: vjp(model, batch),
    "vmap": lambda model, batch: vmap(model, randomness="different")(batch),
    "fake tensors": fake,
    "export": lambda model, batch: torch.export.export(model, (batch,)),
    "strict export": lambda model, batch: torch.export.export(model, (batch,), strict=True),
    "trace": lambda model, batch: torch.jit.trace(model, batch, check_trace=False),
}


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attached(model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str | None) -> Checkpointer | None:
    config = CheckpointConfig(base_every=4, batch=2, deadline_s=30, bases="capture")
    return None if url is None else attach(model, optimizer, Hierarchy.of(url), config=config)


def train(
    step: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], last: int, url: str | None, *, says_end: bool
) -> tuple[dict[int, str], Checkpointer | None]:
    """``step``: one iteration up to the optimizer's step; gives the loss."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    checkpointer = attached(model, optimizer, url)
    first = 0 if checkpointer is None else checkpointer.version
    losses: dict[int, str] = {}
    for version in range(first + 1, last + 1):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(version))
        optimizer.zero_grad()
        losses[version] = step(model, batch).item().hex()
        optimizer.step()
        if checkpointer is not None and says_end:
            checkpointer.end_iteration()
    return losses, checkpointer


def resumes_alike(
    step: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    log: pytest.LogCaptureFixture,
    *,
    says_end: bool,
    published: int,
) -> None:
    """A job that fails after five steps, of which the fifth was ``published`` or not, is the same as one that does
    not."""
    url = memory()
    before, checkpointer = train(step, 5, url, says_end=says_end)
    assert checkpointer is not None
    assert checkpointer.stats.failed_saves == 0
    checkpointer.abort()
    after, checkpointer = train(step, LAST, url, says_end=says_end)
    assert checkpointer is not None
    assert checkpointer.recovery is not None
    assert checkpointer.recovery.notes == ()
    assert checkpointer.recovery.fidelity is Fidelity.EXACT
    assert checkpointer.recovery.version == published
    checkpointer.abort()
    assert [each.message for each in log.records if each.levelno >= logging.WARNING] == [], "nothing was written to"
    expected, _ = train(step, LAST, None, says_end=says_end)
    assert before | after == expected


@pytest.mark.parametrize("says_end", [True, False])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_pass_beside_training(beside: Beside, says_end: bool, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        beside(model, batch)
        value = loss(model, batch)
        value.backward()
        return value

    resumes_alike(step, caplog, says_end=says_end, published=5 if says_end else 4)


@pytest.mark.parametrize("says_end", [True, False])
def test_training_by_transforms_alone(says_end: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The gradients are those of functional_call, and the model itself is never called."""

    def step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}

        def of(own: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional_call(model, own, (batch,)).square().mean()  # type: ignore[no-any-return]

        gradients, value = torch.func.grad_and_value(of)({name: each.detach() for name, each in trained.items()})
        for name, each in trained.items():
            each.grad = gradients[name]
        return value  # type: ignore[no-any-return]

    resumes_alike(step, caplog, says_end=says_end, published=5 if says_end else 4)


def test_what_cannot_be_compiled_whole_says_why() -> None:
    model = Model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    checkpointer = attached(model, optimizer, memory())
    assert checkpointer is not None
    beside = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"attach to what torch\.compile returns, or leave fullgraph=True out"):
        beside(torch.ones(2, 4))
    checkpointer.abort()

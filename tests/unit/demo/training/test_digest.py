"""The demo's own comparison of two runs: every bit of the state convicts, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercheck.demo.training import digest
from tiercheck.demo.training.digest import state_digest

NUMELS = (5, 8)
"""Two ranks have 3 and 4 elements of each; of the first the second rank's third one is padding."""


def engine(*, junk: float, rank: int = 1) -> Any:
    """One rank of a ZeRO-3 engine, as far as the digest looks at it."""
    parameters, values = [], torch.arange(1.0, sum(NUMELS) + 1).split(list(NUMELS))
    for numel, value in zip(NUMELS, values, strict=True):
        size = -(-numel // 2)
        own = value[rank * size : (rank + 1) * size]
        partition = torch.cat([own, torch.full((size - own.numel(),), junk)])
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.ds_tensor, parameter.ds_numel, parameter.ds_process_group = partition, numel, None
        parameters.append(parameter)
    master = torch.cat([each.ds_tensor for each in parameters])
    state = {master: {"exp_avg": master / 2, "step": torch.tensor(3.0)}}
    inner = SimpleNamespace(state=state)
    optimizer = SimpleNamespace(optimizer=inner, fp16_groups=[parameters], fp32_partitioned_groups_flat=[master])
    module = SimpleNamespace(
        named_parameters=lambda: [(f"p{index}", each) for index, each in enumerate(parameters)],
        parameters=lambda: parameters,
    )
    return SimpleNamespace(optimizer=optimizer, module=module)


@pytest.fixture(autouse=True)
def second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "partition_rank", lambda parameter: 1)


def test_padding_that_nobody_has_initialised_convicts_nobody() -> None:
    assert state_digest(engine(junk=0.0)) == state_digest(engine(junk=7.5))


@pytest.mark.parametrize("element", [0, 1, 3, 6])
@pytest.mark.parametrize("kind", ["parameters", "masters", "optimizer"])
def test_every_element_that_is_trained_does(kind: str, element: int) -> None:
    other = engine(junk=0.0)
    (master,) = other.optimizer.fp32_partitioned_groups_flat
    if kind == "parameters":
        parameter, at = (0, element) if element < 3 else (1, element - 3)
        other.optimizer.fp16_groups[0][parameter].ds_tensor[at] += 1
    elif kind == "masters":
        master[element] += 1
    else:
        other.optimizer.optimizer.state[master]["exp_avg"][element] += 1
    differing = {name for name, value in state_digest(other).items() if value != state_digest(engine(junk=0.0))[name]}
    assert differing == {kind}


def test_the_first_rank_has_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "partition_rank", lambda parameter: 0)
    first, other = engine(junk=0.0, rank=0), engine(junk=0.0, rank=0)
    other.optimizer.fp16_groups[0][0].ds_tensor[2] += 1
    assert state_digest(first)["parameters"] != state_digest(other)["parameters"]

"""Exactly the candidate that an optimizer on a GPU follows is chosen to stand in for it, or none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.simulated_gpu import powers_of, simulate
from tiercheck import schema
from tiercheck.errors import ConfigurationError
from tiercheck.format.host_state import pack, unpack
from tiercheck.kernels.gpu_adam import FUSED, OPERATIONS, ROUNDINGS, Fused, Powers, Rounding, Scheme
from tiercheck.streams.optimizers.registry import optimizer_of
from tiercheck.streams.optimizers.stand_in import (
    StandIn,
    certified_function,
    find_stand_in,
    known_stand_in,
    outcomes_of,
    trials_of,
)

ADAM, ADAMW = "torch.optim.adam.Adam", "torch.optim.adamw.AdamW"
OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 1e-4, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.0},
]


def found_for(kind: str, implementation: str) -> StandIn:
    return find_stand_in(kind, implementation, OPTIONS, "cuda")


@pytest.mark.parametrize(
    ("kind", "implementation", "rounding"),
    [
        *((ADAMW, "fused", each) for each in FUSED),
        *((ADAMW, "foreach", each) for each in OPERATIONS),
        (ADAM, "fused", FUSED[0]),
        (ADAM, "single_tensor", ROUNDINGS["operations.reciprocal"]),
    ],
    ids=lambda value: value.name if isinstance(value, Rounding) else value.rpartition(".")[2],
)
def test_the_candidate_that_it_follows_is_chosen(
    kind: str, implementation: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, kind, rounding)
    assert known_stand_in(kind, implementation) is None
    found = found_for(kind, implementation)
    assert found.candidate == rounding.name
    assert known_stand_in(kind, implementation) == found
    tables = {each.beta for each in found.tables}
    assert (tables >= {0.9, 0.999, 0.8, 0.99}) if rounding.powers else not tables


def test_no_two_candidates_pass_the_same_trials() -> None:
    """So an experiment that one passes is failed by all others."""
    for kind in (ADAM, ADAMW):
        optimizer, results = optimizer_of(kind), {}
        trials = trials_of(optimizer)
        betas = tuple({beta for trial in trials for beta in optimizer.betas(trial.options)})
        for candidate in optimizer.candidates:
            function = candidate.on_host(powers_of(ROUNDINGS[candidate.name], betas))
            outcomes = outcomes_of(optimizer, function, trials)
            results[candidate.name] = b"".join(array.tobytes() for each in outcomes for array in each.values())
        assert len(set(results.values())) == len(optimizer.candidates) == len(FUSED) + len(OPERATIONS)


@pytest.mark.parametrize(
    ("implementation", "rounding"),
    [
        ("fused", Rounding(Scheme.WEIGHTED, wide=True, first=Fused.MOMENT, second=Fused.NEITHER)),
        ("fused", Rounding(Scheme.WEIGHTED, wide=False, first=Fused.GRADIENT, second=Fused.NEITHER)),
        ("fused", OPERATIONS[0]),
        ("foreach", FUSED[0]),
    ],
    ids=lambda value: value.name if isinstance(value, Rounding) else value,
)
def test_a_placement_that_is_none_of_them_is_refused(
    implementation: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, ADAMW, rounding)
    with pytest.raises(ConfigurationError, match=r"no kernel on the host has the bits of .*AdamW") as refused:
        found_for(ADAMW, implementation)
    tried = {"fused": FUSED, "foreach": OPERATIONS}[implementation]
    assert all(f"{each.name}: " in str(refused.value) for each in tried)
    assert known_stand_in(ADAMW, implementation) is None


def test_a_power_that_the_kernel_computes_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a late step, by one last bit."""

    def other_powers(rounding: Rounding, betas: tuple[float, ...]) -> Powers:
        tables = {beta: table.copy() for beta, table in powers_of(rounding, betas).tables.items()}
        for table in tables.values():
            table[12:13] = np.nextafter(table[12:13], table.dtype.type(1))
        return Powers(tables)

    simulate(monkeypatch, ADAMW, FUSED[0], powers=other_powers)
    with pytest.raises(ConfigurationError, match="no kernel on the host has the bits"):
        found_for(ADAMW, "fused")


class TestInAnotherProcess:
    @pytest.fixture
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        simulate(monkeypatch, ADAMW, FUSED[0])
        return found_for(ADAMW, "fused")

    def test_it_is_believed_for_the_bits_that_it_gets(self, stand_in: StandIn) -> None:
        """What a base says of it is all that is needed."""
        told = schema.read(StandIn, unpack(pack(schema.plain(stand_in), name="identity")))
        assert told == stand_in
        function = certified_function(optimizer_of(ADAMW), told)
        p, g = np.ones(5, np.float32), np.full(5, 0.5, np.float32)
        state = {name: np.zeros(5, np.float32) for name in ("exp_avg", "exp_avg_sq")}
        function(p, state, [g], [optimizer_of(ADAMW).step(OPTIONS[0], 1)])
        assert np.all(p < 1) and np.all(state["exp_avg"] > 0)

    def test_another_digest_another_table_and_an_unknown_name_are_refused(self, stand_in: StandIn) -> None:
        optimizer, (first, *others) = optimizer_of(ADAMW), stand_in.tables
        wrong = np.nextafter(np.frombuffer(first.values, np.float32), np.float32(1)).tobytes()
        for told, why in (
            (replace(stand_in, digest="0" * 32), "does not get the bits"),
            (replace(stand_in, candidate="fused32.moment.moment"), "does not get the bits"),
            (replace(stand_in, tables=(replace(first, values=wrong), *others)), "does not get the bits"),
            (replace(stand_in, tables=(replace(first, values=first.values[:-1]), *others)), "are damaged"),
            (replace(stand_in, tables=()), "are not known"),
            (replace(stand_in, candidate="fused33"), "knows no kernel 'fused33'"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                certified_function(optimizer, told)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("torch.optim.sgd.SGD", OPTIONS, "no kernel stands for torch.optim.sgd.SGD on a GPU"),
        ("mine.Odd", OPTIONS, "no kernel stands for mine.Odd on a GPU"),
        (ADAMW, [{**OPTIONS[0], "capturable": True}], "as it runs: capturable is on"),
        (ADAMW, [{**OPTIONS[0], "betas": (0.9, 1 - 1e-8)}], "which is too many"),
    ],
)
def test_what_nothing_stands_in_for_is_said(
    kind: str, options: list[dict[str, Any]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, ADAMW, FUSED[0])
    with pytest.raises(ConfigurationError, match=why):
        find_stand_in(kind, "fused", options, "cuda")


def test_a_device_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigurationError, match="could not be tried on cuda:77"):
        find_stand_in(ADAMW, "fused", OPTIONS, "cuda:77")

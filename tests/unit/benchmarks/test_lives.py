"""Loops that are killed and resumed: what comes back is compared, and what does not is found."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.lives import loops
from benchmarks.lives.life import Life
from benchmarks.lives.loops import LOOPS, Loop, adamw, batch, perceptron

FEW = ["--versions", "8", "--kills", "1", "--base-every", "3", "--seed", "5"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_killed_loop_comes_back_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lives", "--only", "^scaled$", *FEW]) == 0
    (line,) = lines(capsys)
    assert (line["loop"], line["lives"], line["failure"]) == ("scaled", 2, "")
    assert line["recoveries"] == {"exact": 1}


def forgetful(life: Life) -> None:
    """What its loss depends on is in no version: a count that begins anew with each process."""
    model = perceptron()
    optimizer = adamw(model)
    count = 0
    with life.attached(model, optimizer) as checkpointer:
        for version in range(checkpointer.version + 1, life.versions + 1):
            count += 1
            loss = model(batch(version)[0]).square().mean() * count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            life.record(version, loss)
            checkpointer.end_iteration()


def failing(life: Life) -> None:
    with life.attached(torch.nn.Linear(1, 1)):
        raise RuntimeError("no optimizer")


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (forgetful, "of rank 0 was trained in life1 with other bits"),
        (failing, "undisturbed: RuntimeError: no optimizer"),
    ],
    ids=["forgetful", "failing"],
)
def test_what_differs_or_fails_is_told(
    run: object, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loops.LOOPS, "given", Loop(run))  # type: ignore[arg-type]
    assert main(["lives", "--only", "^given$", *FEW]) == 1
    (line,) = lines(capsys)
    assert found in str(line["failure"])


def late(life: Life) -> None:
    """It writes to its parameters when the version is saved, which a recovery says."""
    model = perceptron()
    optimizer = adamw(model)
    with life.attached(model, optimizer) as checkpointer:
        for version in range(checkpointer.version + 1, life.versions + 1):
            loss = model(batch(version)[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            life.record(version, loss)
            checkpointer.end_iteration()
            with torch.no_grad():
                model[0].weight.mul_(0.9)


def test_what_follows_an_approximate_recovery_may_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loops.LOOPS, "given", Loop(late))
    assert main(["lives", "--only", "^given$", *FEW]) == 0
    (line,) = lines(capsys)
    assert (line["recoveries"], line["failure"]) == ({"approximate": 1}, "")


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lives", "--only", "nothing like it"]) == 2
    assert f"the loops are {', '.join(LOOPS)}" in capsys.readouterr().err

"""The fidelity benchmark: the training it branches off can be resumed, and its figures are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.fidelity import report
from benchmarks.fidelity.experiment import Course, Experiment
from benchmarks.fidelity.schemes import Replayed, Snapshot, Stale, schemes
from benchmarks.fidelity.setups import experiments
from benchmarks.parts import EncodedTensor
from benchmarks.training import SetUp, State, Training, replay_of
from tiercheck.streams.codecs import codec, codec_names

TINY = SetUp(width=32, layers=1, heads=2, seed=5, sequence=32, micro_batch=2, validation_windows=8)
STEPS = 4


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return list(Experiment("tiny", TINY, Course(4, STEPS, 2), ("sparse+feedback",), threads=1).lines())


def named(lines: list[dict[str, Any]], scheme: str, mode: str = "replay") -> dict[str, Any]:
    (found,) = (line for line in lines if line["scheme"] == scheme and line["mode"] == mode)
    return found


# The training.


def test_a_training_goes_on_from_a_state_bit_for_bit() -> None:
    training = Training(TINY)
    training.train(3)
    base = training.state()
    training.train(2)
    later, loss = training.state(), training.validation_loss()
    assert later.version == 5
    training.load(base)
    assert training.state().differing_bits(base) == 0
    training.train(2)
    assert training.state().differing_bits(later) == 0
    assert training.validation_loss() == loss
    assert later.distance(base) > 0
    assert base.copy().differing_bits(base) == 0


def test_a_seed_decides_everything() -> None:
    def trained(setup: SetUp) -> State:
        training = Training(setup)
        training.train(2)
        return training.state()

    assert trained(TINY).differing_bits(trained(TINY)) == 0
    assert trained(TINY).differing_bits(trained(replace(TINY, seed=6))) > 0


def test_the_replay_of_the_gradients_themselves_is_the_training() -> None:
    training = Training(TINY)
    training.train(2)
    scheme = Replayed("exact", training.state(), replay=replay_of("fused"), threads=1)
    for _ in range(3):
        training.backward()
        scheme.take(training.gradients(), training.step_options(training.version + 1))
        training.step()
    assert scheme.restored().differing_bits(training.state()) == 0
    assert scheme.written_bytes == 3 * 4 * TINY.parameters


# The schemes.


def test_every_codec_is_tried_with_and_without_feedback() -> None:
    training = Training(TINY)
    training.train(1)
    tried = schemes(training.state(), threads=1)
    names = {scheme.name for scheme in tried if isinstance(scheme, Replayed)}
    assert names == set(codec_names())
    assert {"int8", "int8+feedback", "nf4+feedback", "onebit+feedback", "sparse+feedback"} <= names
    assert len({(scheme.mode, scheme.name) for scheme in tried}) == len(tried)


def test_some_schemes_are_chosen_by_name() -> None:
    training = Training(TINY)
    training.train(1)
    tried = schemes(training.state(), threads=1, names=("snapshot", "nothing", "nf4"))
    assert [scheme.name for scheme in tried] == ["nothing", "nf4", "snapshot"]


def test_a_snapshot_restores_the_state_within_its_codec() -> None:
    training = Training(TINY)
    training.train(2)
    base = training.state()
    training.train(2)
    true = training.state()
    for codec_name, error_max in (("snapshot", 0.02), ("snapshot+nf4", 0.3)):
        scheme = Snapshot(codec_name, base, threads=1)
        for _ in range(2):
            scheme.take({}, training.step_options(1))
        scheme.end(true)
        restored = scheme.restored()
        assert restored.version == true.version
        assert restored.distance(true) / true.distance(base) <= error_max + 1e-6
        for name, (_, first, second) in restored.tensors.items():
            assert np.all(second >= 0)
            assert np.abs(first - true.tensors[name][1]).max() <= 0.3 * np.abs(true.tensors[name][1]).max() + 1e-12
        assert scheme.written_bytes == 2 * scheme.held_bytes, "one a version"


def test_feedback_carries_over_what_was_lost() -> None:
    """What was decoded in sum is what came in, but for the last residual."""
    values = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    tensor = EncodedTensor(codec("onebit+feedback"), "F32", (1000,))
    total = np.zeros(1000, np.float64)
    for n in range(20):
        tensor.encode(values, seed=n)
        total += tensor.decode()
    assert tensor.residual is not None
    assert np.allclose(total + tensor.residual, 20.0 * values, atol=1e-3)
    assert 0 < tensor.nbytes < 1000 * 4 / 16


# The figures.


def test_exact_is_exact_and_nothing_is_as_far_off_as_can_be(lines: list[dict[str, Any]]) -> None:
    exact = named(lines, "exact")
    assert exact["error"] == exact["differing"] == exact["gap_resumed"] == exact["gap_later"] == 0
    assert exact["bits"] == pytest.approx(32, rel=0.01)
    assert exact["held_bits"] == pytest.approx(32 * STEPS, rel=0.01)
    nothing = named(lines, "nothing", "stale")
    assert nothing["error"] == 1
    assert nothing["bits"] == 0
    assert nothing["differing"] > 0


def test_more_bits_are_nearer_to_the_truth(lines: list[dict[str, Any]]) -> None:
    errors = [named(lines, name)["error"] for name in ("int8", "nf4", "onebit+feedback")]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.1
    assert errors[-1] < 1
    assert named(lines, "int8")["bits"] < 10


def test_what_was_trained_on_is_recovered_bit_for_bit(lines: list[dict[str, Any]]) -> None:
    trained_on = named(lines, "sparse+feedback", "trained-on")
    assert trained_on["differing"] == trained_on["error"] == 0
    assert trained_on["bits"] < 4
    assert named(lines, "sparse+feedback")["differing"] > 0, "and is not where training did not step with it"


def test_the_run_itself_is_told(lines: list[dict[str, Any]]) -> None:
    run = named(lines, "uninterrupted", "run")
    assert run["losses"].keys() == {"base", "lost", "later"}
    assert run["moved"] > 0
    assert run["setup"]["parameters"] == run["parameters"] == TINY.parameters


def test_the_designs_set_ups_are_two_seeds_and_two_sizes() -> None:
    found = experiments(models=None, seeds=(1, 2), threads=1, names=None, quick=False, progress=print)
    sizes = {each.setup.parameters for each in found}
    assert len(sizes) >= 2
    assert max(sizes) >= 20_000_000
    assert {(each.model, each.setup.seed) for each in found} >= {("small", 1), ("small", 2), ("large", 1), ("large", 2)}
    assert all(each.course.lost == each.course.later == 50 for each in found)


# The command.


def test_the_command_prints_lines_and_what_it_printed_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fidelity", "--quick", "--json", "--seeds", "1,2", "--model", "small", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    machine, *found = [json.loads(line) for line in out.splitlines()]
    assert machine["figure"] == "machine"
    assert {line["seed"] for line in found} == {1, 2}
    assert all({"figure", "model", "parameters", "seed", "mode", "scheme"} <= line.keys() for line in found)
    kept, picture = tmp_path / "lines.json", tmp_path / "picture.svg"
    kept.write_text(out)
    assert main(["fidelity", "--lines", str(kept), "--plot", str(picture), "--markdown"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("small: 0.0M parameters, 2 seeds:")
    assert table[2] == "| scheme | bits/param/step | error | gap at resumption | gap later |"
    assert any(line.startswith("| exact | 32 | 0, bit for bit |") for line in table)
    first = picture.read_bytes()
    texts = "".join(ElementTree.fromstring(first).itertext())
    for text in ("int8", "onebit+feedback", "0, bit for bit", "2 seeds", "bits written per parameter and step"):
        assert text in texts
    assert main(["fidelity", "--lines", str(kept), "--plot", str(picture)]) == 0
    assert picture.read_bytes() == first, "the same lines give the same picture"


def test_lines_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"figure": "shm.put/memcpy"}\n')
    assert main(["fidelity", "--lines", str(other)]) == 2
    assert "no figure of fidelity" in capsys.readouterr().err


def a_line(scheme: str, seed: int, **more: Any) -> dict[str, Any]:
    numbers = {"bits": 8.0, "held_bits": 400.0, "error": 0.5, "gap_resumed": 0.25, "gap_later": 0.0, "differing": 1}
    common = {"figure": "fidelity", "model": "m", "parameters": 10, "seed": seed, "mode": "replay", "scheme": scheme}
    return {**common, **numbers, **more}


def test_rows_are_means_over_seeds_and_exact_only_where_every_seed_is() -> None:
    (row,) = report.rows([a_line("a", 1), a_line("a", 2, error=0.0, differing=0, gap_resumed=-0.75)])
    assert (row.seeds, row.error, row.gap_resumed, row.exact) == (2, 0.25, -0.25, False)
    assert report.rows([a_line("a", 1, differing=0)])[0].exact


def test_a_scheme_of_nothing_keeps_the_base() -> None:
    training = Training(TINY)
    training.train(1)
    base = training.state()
    training.train(2)
    scheme = Stale("nothing", base)
    scheme.end(training.state())
    assert scheme.restored().differing_bits(base) == 0
    assert scheme.restored().version == 3

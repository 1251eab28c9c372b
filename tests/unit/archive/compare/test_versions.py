"""Two versions compared by tensor of the model, whoever held which part of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiercheck
from tests.archived import FIRST_LIFE, LAST, Left
from tests.unit.integrations.test_replicas import Job, kept_alike
from tiercheck.archive.archive import Archive
from tiercheck.archive.compare.measure import Distance, Flat, measure
from tiercheck.archive.compare.versions import Form, plan
from tiercheck.archive.indexes import StoredIndex
from tiercheck.errors import RecoveryError
from tiercheck.format.container import TensorSpec
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range, Role
from tiercheck.types import Fidelity

__all__ = ["kept_alike"]


@pytest.fixture
def archive(finished: Left) -> Iterator[Archive]:
    with tiercheck.open(finished.url) as archive:
        yield archive


def test_each_tensor_is_as_far_as_the_states_are(archive: Archive) -> None:
    """Of replicas the lowest rank's is compared, once; buffers count as well."""
    found = archive.diff(5, LAST)
    before, after = (archive.rebuild(0, version).state for version in (5, LAST))
    rows = {each.name: each for each in found.tensors}
    assert rows.keys() == {**before.masters(), **before.buffers()}.keys()
    for name, held in {**before.masters(), **before.buffers()}.items():
        moved = {**after.masters(), **after.buffers()}[name].double() - held.double()
        assert rows[name].distance.elements == held.numel()
        assert rows[name].distance.l2 == pytest.approx(float(moved.norm()))
        assert rows[name].distance.changed == int((moved != 0).sum())
    assert (found.versions, found.generations, found.fidelity, found.notes) == ((5, LAST), (1, 2), Fidelity.EXACT, ())
    assert not found.same
    relative = [each.distance.relative for each in found.tensors]
    assert relative == sorted(relative, reverse=True)
    assert not rows["1.weight"].differs  # it is frozen


def test_a_version_is_like_itself_and_like_its_copy(archive: Archive, left: Left) -> None:
    assert archive.diff(LAST, LAST, optimizer=True).same
    with tiercheck.open(left.url) as other:
        found = archive.diff(LAST, LAST, other=other)
        assert (found.same, found.host_state, found.written) == (True, (), ())


def test_the_optimizers_tensors_are_compared_when_asked_for(archive: Archive) -> None:
    rows = {(each.name, each.state): each for each in archive.diff(4, LAST, optimizer=True).tensors}
    assert {state for name, state in rows if name == "0.weight"} == {"", "step", "exp_avg", "exp_avg_sq"}
    assert rows["0.weight", "step"].distance.max_abs == LAST - 4
    assert rows["0.weight", "exp_avg"].distance.elements == 15
    new = {each.state: each for each in archive.diff(0, LAST, optimizer=True).tensors if each.name == "2.bias"}
    assert new["exp_avg"].before is None
    assert new["exp_avg"].after == Form((1,), "F32")


def test_a_version_of_another_future_is_compared_by_its_generation(archive: Archive) -> None:
    assert archive.diff(FIRST_LIFE, FIRST_LIFE, generation=1).same
    with pytest.raises(RecoveryError, match="version 99 cannot be read"):
        archive.diff(1, 99)


def test_tensors_that_one_rank_stores_for_all_are_compared_once(
    kept_alike: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each parameter is stored by one rank. A prune keeps all ranks' parts, and a copy brings them."""
    job = Job(tmp_path, f"owned-{tmp_path.name}")
    job.run(2, 9, closed=True)
    job.lose(0, 1)
    url = f"nvme://{tmp_path}/durable?survives=rack"
    with tiercheck.open_to_change(url) as archive:
        found = archive.diff(8, 9)
        before, after = (load_file(archive.export(tmp_path / f"{version}", version=version).path) for version in (8, 9))
        rows = {each.name: each for each in found.tensors}
        assert rows.keys() == before.keys()
        for name, held in before.items():
            assert rows[name].distance.elements == held.numel()
            assert rows[name].distance.l2 == pytest.approx(float((after[name].double() - held.double()).norm()))
        archive.prune(keep_last=1)
        assert archive.diff(8, 9).tensors == found.tensors
        target = f"nvme://{tmp_path_factory.mktemp('owned')}/copy?survives=rack"
        archive.copy(target, 9)
        with tiercheck.open(target) as copy:
            assert copy.diff(9, 9, other=archive).same


def stored(pieces: dict[str, tuple[object, ...]], *tensors: LogicalTensor) -> StoredIndex:
    index = LogicalIndex({each.name: each for each in tensors}, pieces)  # type: ignore[arg-type]  # of any kind of piece
    lengths = {name: sum(piece.elements for piece in each) for name, each in index.stored.items()}
    return StoredIndex(index, {name: TensorSpec(name, "F32", (length,)) for name, length in lengths.items()})


def test_versions_of_other_layouts_are_compared_element_by_element() -> None:
    """Two flat partitions with padding, against one rank that has the tensors whole and another with a replica."""
    w, b = LogicalTensor("w", "BF16", (3, 5), trained=True), LogicalTensor("b", "F32", (4,), trained=True)
    flat = {
        0: stored({"master/flat": (Range("w", 0, 10),)}, w),
        1: stored({"master/flat": (Range("w", 10, 5), Range("b", 0, 4), Padding(1))}, w, b),
    }
    blocks = {
        rank: stored({"master/w": (Block("w", (0, 0), (3, 5)),), "master/b": (Range("b", 0, 4),)}, w, b)
        for rank in range(2)
    }
    values = torch.arange(20.0)
    held = {
        "flat": {(0, "master/flat"): values[:10], (1, "master/flat"): values[10:]},
        "blocks": {
            (rank, name): part
            for rank in range(2)
            for name, part in (("master/w", values[:15]), ("master/b", values[15:19]))
        },
    }
    for ours, theirs, one, two in ((flat, blocks, "flat", "blocks"), (blocks, flat, "blocks", "flat")):
        chosen = plan(ours, theirs)
        found = {name: Distance() for name in ("w", "b")}
        for rank, by_other in chosen.transfers.items():
            for other, transfers in by_other.items():
                for each in transfers:
                    name, _ = chosen.name_at(rank, each.target, each.copy.target_start)
                    before, after = held[one][rank, each.target], held[two][other, each.source]
                    measure(each.copy, Flat.of(before, "F32"), Flat.of(after, "F32"), found[name])
        assert {name: (each.elements, each.changed) for name, each in found.items()} == {"w": (15, 0), "b": (4, 0)}


def test_tensors_of_one_version_alone_and_of_other_shapes_are_named() -> None:
    w, grown = LogicalTensor("w", "F32", (2,), trained=True), LogicalTensor("w", "F32", (3,), trained=True)
    buffer = LogicalTensor("steps", "I64", (), Role.BUFFER)
    before = {0: StoredIndex(LogicalIndex.of_whole([w]), {"master/w": TensorSpec("master/w", "F32", (2,))})}
    specs = {"master/w": TensorSpec("master/w", "F32", (3,)), "extra/steps": TensorSpec("extra/steps", "I64", ())}
    after = {0: StoredIndex(LogicalIndex.of_whole([grown, buffer]), specs)}
    chosen = plan(before, after)
    assert chosen.forms["w", ""] == (Form((2,), "F32", "F32"), Form((3,), "F32", "F32"))
    assert chosen.forms["steps", ""] == (None, Form((), "I64", "I64", trained=False))
    assert chosen.transfers == {}

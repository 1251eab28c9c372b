from __future__ import annotations

import re

import pytest

from tiercheck import schema
from tiercheck.format.host_state import pack
from tiercheck.format.index import assemble as assembling
from tiercheck.format.index.assemble import Holdings, assemble
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range, Role, lies_as_master
from tiercheck.format.index.message import IndexMessage, plain_index, read_index

MATRIX = LogicalTensor("layer.weight", "BF16", (4, 6), trained=True)
FACTOR = LogicalTensor("factor", "BF16", (), trained=True)
MEAN = LogicalTensor("norm.mean", "F32", (6,), Role.BUFFER)


def tensors(*each):
    return {tensor.name: tensor for tensor in each}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"master/a": [Range("layer.weight", 20, 5)]}, "does not lie in a tensor of [4, 6]"),
        ({"master/a": [Range("layer.weight", -1, 5)]}, "does not lie in"),
        ({"master/a": [Range("layer.weight", 5, -1)]}, "does not lie in"),
        ({"master/a": [Block("layer.weight", (0, 5), (4, 2))]}, "does not lie in"),
        ({"master/a": [Block("layer.weight", (0,), (4,))]}, "does not lie in"),
        ({"master/a": [Range("another", 0, 1)]}, "'another', which is not among the tensors"),
        ({"master/a": [Padding(-1)]}, "a padding of -1"),
        ({"state/a/exp_avg": [Padding(1)]}, "neither a master nor an extra"),
    ],
)
def test_a_piece_lies_in_its_tensor(stored, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LogicalIndex(tensors(MATRIX), {name: tuple(pieces) for name, pieces in stored.items()})


def test_the_pieces_of_a_stored_tensor_cover_it_exactly_once():
    index = LogicalIndex(tensors(MATRIX), {"master/flat": (Range("layer.weight", 0, 24), Padding(2))})
    index.check({"master/flat": (26,), "state/flat/exp_avg": (26,)})
    for shapes, message in (
        ({"master/flat": (25,)}, "'master/flat' have 26 elements, and it has 25"),
        ({}, "'master/flat' is not stored"),
        ({"master/flat": (26,), "extra/a": (1,)}, "'extra/a' is not in the index"),
    ):
        with pytest.raises(ValueError, match=message):
            index.check(shapes)


def test_the_optimizers_tensors_lie_as_their_master_and_others_belong_to_it_as_a_whole():
    assert lies_as_master("exp_avg", (4, 6), (4, 6))
    assert lies_as_master("exp_avg", (), ())
    assert not lies_as_master("row", (4,), (4, 6))
    assert not lies_as_master("step", (), (4, 6))
    assert not lies_as_master("step", (), ())


def test_an_alias_is_no_tensor_of_its_own():
    index = LogicalIndex.of_whole([MATRIX], {"head.weight": "layer.weight"})
    assert read_index(plain_index(index)).aliases == {"head.weight": "layer.weight"}
    with pytest.raises(ValueError, match=r"'layer\.weight' is a tensor, and another name"):
        LogicalIndex.of_whole([MATRIX], {"layer.weight": "head.weight"})


# As a base carries it


def test_what_a_later_release_adds_is_ignored():
    plain = plain_index(LogicalIndex({**tensors(MATRIX)}, {"master/flat": (Range("layer.weight", 3, 9),)}))
    later = {**plain, "new": 1, "tensors": [[*each, "new"] for each in plain["tensors"]]}
    later["stored"] = {name: [[*piece, "new"] for piece in pieces] for name, pieces in plain["stored"].items()}
    assert read_index(later) == read_index(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": []}, "a tensor that it does not have"),
        ({"tensors": [["t", "F32", [2], 0, True, ""]] * 2}, "a tensor twice"),
        ({"tensors": [["t", "F32", [-2], 0, True, ""]]}, "tensors"),
        ({"tensors": [["t", "F33", [2], 0, True, ""]]}, "unknown dtype 'F33'"),
        ({"tensors": [["t", "F32", [2**40, 2**40], 0, True, ""]]}, "too large"),
        ({"tensors": [["t", "F32", [1] * 65, 0, True, ""]]}, "tensors"),
        ({"stored": {"master/f": [[0, 0, [2]]]}}, "neither a range, nor a block, nor padding"),
        ({"stored": {"master/f": [[-1, [0], [2]]]}}, "neither a range, nor a block, nor padding"),
        ({"stored": {"master/f": [[0, 0, 3]]}}, "does not lie in"),
        ({"stored": {"master/f": [[0, 0, 2**63]]}}, "stored"),
        ({"stored": {"master/f": [[7, 0, 1]]}}, "a tensor that it does not have"),
        ({"stored": 3}, "stored"),
    ],
)
def test_a_malformed_index_is_refused(change, message):
    plain = {"tensors": [["t", "F32", [2], 0, True, ""]], "stored": {"master/f": [[0, 0, 2]]}}
    read_index(plain)
    with pytest.raises(ValueError, match=message):
        read_index({**plain, **change})


def test_the_bytes_a_tensor_are_as_stated():
    """In the module's docstring, and in the ADR."""
    names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(1000)]
    each = [LogicalTensor(name, "BF16", (4096, 11008), trained=True) for name in names]
    letters = sum(map(len, names))
    none = len(pack(schema.plain(IndexMessage([]))))
    of_names = len(pack(schema.plain(IndexMessage(each)))) - none - letters
    assert of_names / 1000 == pytest.approx(18, abs=0.5)
    whole = len(pack(plain_index(LogicalIndex.of_whole(each)))) - none - letters
    assert 1 <= (whole - of_names) / 1000 <= 3
    pieces = tuple(Range(name, 4096 * 11008 // 64 * 3, 4096 * 11008 // 64) for name in names)
    parts = len(pack(plain_index(LogicalIndex(tensors(*each), {"master/flat": pieces})))) - none - letters
    assert (parts - of_names) / 1000 == pytest.approx(14, abs=0.5)


# What another layout takes


def test_copies_are_read_from_the_ranks_own_number_or_spread():
    every = {rank: LogicalIndex.of_whole([MATRIX, MEAN]) for rank in range(4)}
    taken = {rank: assemble(every[0], Holdings(every), rank=rank) for rank in range(8)}
    by_tensor = {
        rank: {each.target: each.rank for each in plan.transfers} for rank, plan in taken.items() if not plan.missing
    }
    assert [by_tensor[rank]["master/layer.weight"] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    # A buffer may differ between ranks.
    assert [by_tensor[rank]["extra/norm.mean"] for rank in range(8)] == [0, 1, 2, 3, 0, 0, 0, 0]


def test_what_is_missing_is_named():
    old = LogicalIndex(tensors(MATRIX), {"master/flat": (Range("layer.weight", 0, 5),)})
    wider = LogicalTensor("layer.weight", "BF16", (4, 7), trained=True)
    stored = {"master/a": (Range("layer.weight", 3, 4),), "extra/b": (Range("norm.mean", 0, 6),)}
    wanted = LogicalIndex(tensors(MATRIX, MEAN), stored)
    assert [*map(str, assemble(wanted, Holdings({0: old})).missing)] == [
        "layer.weight (for master/a), elements 5 to 6",
        "norm.mean (for extra/b), elements 0 to 5",
    ]
    columns = LogicalIndex(tensors(MATRIX), {"master/flat": (Block("layer.weight", (0, 0), (4, 2)),)})
    rest = LogicalIndex(tensors(MATRIX), {"master/a": (Block("layer.weight", (1, 1), (2, 3)),)})
    plan = assemble(rest, Holdings({0: columns}))
    assert [*map(str, plan.missing)] == ["layer.weight (for master/a), [2, 2] elements from [1, 2]"]
    plan = assemble(LogicalIndex.of_whole([wider]), Holdings({0: old}))
    assert [*map(str, plan.missing)] == [
        "layer.weight (for master/layer.weight), which has the shape [4, 6] in the checkpoint"
    ]
    assert plan.ranks == ()


def test_a_slice_that_nobody_can_place_goes_to_the_same_slice_alone():
    slices = [LogicalTensor("w", "F32", (2, 3), trained=True, slice_name=f"tensor parallel {n} of 2") for n in range(2)]
    old = Holdings({rank: LogicalIndex.of_whole([slices[rank % 2]]) for rank in range(4)})
    plan = assemble(LogicalIndex.of_whole([slices[1]]), old, rank=6)
    assert not plan.missing
    assert plan.ranks == (1,)
    whole = LogicalTensor("w", "F32", (4, 3), trained=True)
    assert assemble(LogicalIndex.of_whole([whole]), old).missing


def test_ranks_that_do_not_agree_on_a_shape_are_refused():
    other = LogicalTensor("layer.weight", "BF16", (6, 4), trained=True)
    with pytest.raises(ValueError, match=r"\[6, 4\] on rank 1, and \[4, 6\]"):
        Holdings({0: LogicalIndex.of_whole([MATRIX]), 1: LogicalIndex.of_whole([other])})


@pytest.mark.parametrize("axis", [0, 1])
def test_a_plan_looks_at_what_overlaps_and_at_little_else(axis, monkeypatch):
    """From 64 ranks to 48, of 50 tensors."""
    each = [LogicalTensor(f"t{number}", "F32", (192, 192), trained=True) for number in range(50)]

    def block(name, rank, ranks):
        offsets, lengths = [0, 0], [192, 192]
        offsets[axis], lengths[axis] = 192 // ranks * rank, 192 // ranks
        return Block(name, tuple(offsets), tuple(lengths))

    def index(rank, ranks):
        return LogicalIndex(tensors(*each), {f"master/{t.name}": (block(t.name, rank, ranks),) for t in each})

    looked, meet = [], assembling.meet
    monkeypatch.setattr(assembling, "meet", lambda *boxes: looked.append(1) or meet(*boxes))
    old = Holdings({rank: index(rank, 64) for rank in range(64)})
    plans = [assemble(index(rank, 48), old, rank=rank) for rank in range(48)]
    assert not any(plan.missing for plan in plans)
    assert len(looked) == sum(len(plan.transfers) for plan in plans) == 50 * 96

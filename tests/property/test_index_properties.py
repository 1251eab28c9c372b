"""Pieces, overlaps and plans against NumPy, which cuts and joins the same tensors by slicing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.format.checksums import checksum_of
from tiercheck.format.host_state import pack, unpack
from tiercheck.format.index.assemble import Holdings, assemble
from tiercheck.format.index.boxes import Copy, as_range, boxes_of, copy_elements, copy_of, meet, without
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range, Role
from tiercheck.format.index.message import plain_index, read_index
from tiercheck.format.index.outline import area_of, outline_of
from tiercheck.recovery.layouts.holders import Holders, lacking

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def blocks(draw, shape):
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Block("t", offsets, lengths)


@st.composite
def ranges(draw, shape):
    start = draw(st.integers(0, math.prod(shape)))
    return Range("t", start, draw(st.integers(0, math.prod(shape) - start)))


@st.composite
def two_pieces(draw):
    shape = draw(shapes)
    piece = st.one_of(blocks(shape), ranges(shape))
    return shape, draw(piece), draw(piece)


def cut(tensor, piece):
    """The elements of a piece, in order."""
    if isinstance(piece, Padding):
        return np.full(piece.length, -1)
    if isinstance(piece, Range):
        return tensor.reshape(-1)[piece.start : piece.start + piece.length]
    within = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.lengths, strict=True))
    return tensor[within].reshape(-1)


def numbered(shape, first=0):
    return np.arange(first, first + math.prod(shape)).reshape(shape)


@given(two_pieces())
def test_a_range_is_cut_into_few_boxes_in_the_order_of_its_elements(drawn):
    shape, piece, _ = drawn
    tensor = numbered(shape)
    boxes = list(boxes_of(piece, shape))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [cut(tensor, Block("t", *box)) for box in boxes]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == cut(tensor, piece).tolist()
    assert cut(tensor, as_range(piece, shape)).tolist() == cut(tensor, piece).tolist()


def overlap(target, source, shape):
    """What of one piece belongs in the other."""
    target, source = as_range(target, shape), as_range(source, shape)
    if isinstance(target, Range) and isinstance(source, Range):
        shape = (math.prod(shape),)
    boxes = (meet(one, other) for one in boxes_of(target, shape) for other in boxes_of(source, shape))
    return [copy_of(box, target, source, shape) for box in boxes if box is not None]


@given(two_pieces())
def test_an_overlap_is_copied_to_where_it_belongs_and_nothing_else_is(drawn):
    shape, target, source = drawn
    tensor = numbered(shape)
    have, wanted = cut(tensor, source), cut(tensor, target)
    copies = overlap(target, source, shape)
    into = np.full(len(wanted), -1)
    copy_elements(copies, have, into)
    assert into.tolist() == [element if element in have else -1 for element in wanted]
    assert sum(copy.elements for copy in copies) == len(set(have) & set(wanted))
    by_runs = np.full(len(wanted), -1)
    for copy in copies:
        for start, to, length in copy.runs():
            assert copy.source_start <= start <= start + length <= copy.source_stop
            by_runs[to : to + length] = have[start : start + length]
    assert by_runs.tolist() == into.tolist()


@given(two_pieces())
def test_two_ranges_overlap_in_one_run_of_consecutive_elements(drawn):
    shape, *pieces = drawn
    target, source = (as_range(piece, shape) for piece in pieces)
    if isinstance(target, Range) and isinstance(source, Range):
        copies = overlap(target, source, shape)
        assert len(copies) <= 1
        for copy in copies:
            assert len(list(copy.runs())) == 1


@given(two_pieces())
def test_what_is_left_of_a_box_and_the_part_taken_out_are_the_box(drawn):
    shape, one, other = drawn
    tensor = numbered(shape)
    for box in boxes_of(one, shape):
        for another in boxes_of(other, shape):
            if (common := meet(box, another)) is None:
                continue
            left = list(without(box, common))
            assert len(left) <= 2 * len(shape)
            found = [element for each in (common, *left) for element in cut(tensor, Block("t", *each)).tolist()]
            assert sorted(found) == sorted(cut(tensor, Block("t", *box)).tolist())


@dataclass
class Layout:
    """How some ranks hold a model's tensors."""

    indexes: dict[int, LogicalIndex]
    arrays: dict[tuple[int, str], np.ndarray]


@st.composite
def models(draw):
    shape = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    drawn = draw(st.lists(shape, min_size=1, max_size=4))
    roles = [draw(st.sampled_from(Role)) for _ in drawn]
    tensors = [
        LogicalTensor(f"t{number}", "F32", shape, role, trained=role is Role.PARAMETER)
        for number, (shape, role) in enumerate(zip(drawn, roles, strict=True))
    ]
    first, values = 0, {}
    for tensor in tensors:
        values[tensor.name] = numbered(tensor.shape, first)
        first += tensor.elements
    return tensors, values


@st.composite
def layouts(draw, tensors, values):
    """Each tensor whole on all ranks, cut along a dimension, or in the flat partitions that some share."""
    ranks = range(draw(st.integers(1, 4)))
    stored = {rank: {} for rank in ranks}
    flat = []
    for tensor in tensors:
        name = f"{'master' if tensor.trained else 'extra'}/{tensor.name}"
        how = draw(st.sampled_from(["whole", "flat", "cut"]))
        if how == "whole":
            for rank in ranks:
                stored[rank][name] = (Range(tensor.name, 0, tensor.elements),)
        elif how == "cut" and tensor.shape:
            axis = draw(st.integers(0, len(tensor.shape) - 1))
            each = -(-tensor.shape[axis] // len(ranks))
            for rank in ranks:
                offset = min(each * rank, tensor.shape[axis])
                length = min(each, tensor.shape[axis] - offset)
                offsets = tuple(offset if i == axis else 0 for i in range(len(tensor.shape)))
                lengths = tuple(length if i == axis else size for i, size in enumerate(tensor.shape))
                stored[rank][name] = (Block(tensor.name, offsets, lengths),)
        else:
            flat.append(tensor)
    if flat:
        elements = sum(tensor.elements for tensor in flat)
        each = -(-elements // len(ranks)) + draw(st.integers(0, 2))
        for rank in ranks:
            stored[rank]["master/flat"] = tuple(partition(flat, each * rank, each * (rank + 1)))
    indexes = {rank: LogicalIndex({tensor.name: tensor for tensor in tensors}, stored[rank]) for rank in ranks}
    arrays = {
        (rank, name): joined([cut(values.get(getattr(piece, "tensor", None)), piece) for piece in pieces])
        for rank in ranks
        for name, pieces in stored[rank].items()
    }
    return Layout(indexes, arrays)


def joined(parts):
    return np.concatenate([np.zeros(0, int), *parts])


def partition(tensors, start, stop):
    """The elements [start, stop) of the tensors one behind the other, and padding behind them."""
    first = 0
    for tensor in tensors:
        begin, end = max(start, first), min(stop, first + tensor.elements)
        if begin < end:
            yield Range(tensor.name, begin - first, end - begin)
        first += tensor.elements
    if stop > max(start, first):
        yield Padding(stop - max(start, first))


@st.composite
def reshapes(draw):
    tensors, values = draw(models())
    old, new = draw(layouts(tensors, values)), draw(layouts(tensors, values))
    gone = draw(st.sets(st.sampled_from(sorted(old.indexes)))) if draw(st.booleans()) else set()
    return values, old, new, gone


@given(reshapes())
def test_another_layout_gets_every_element_that_somebody_has_and_is_told_of_the_others(drawn):
    values, old, new, gone = drawn
    kept = {rank: index for rank, index in old.indexes.items() if rank not in gone}
    held = set(joined([old.arrays[key] for key in old.arrays if key[0] not in gone]).tolist())
    holdings = Holdings(kept)
    for rank, wanted in new.indexes.items():
        plan = assemble(wanted, holdings, rank=rank)
        for name in wanted.stored:
            expected = new.arrays[rank, name]
            found = np.full(len(expected), -1)
            for each in plan.transfers:
                if each.target == name:
                    before = found.copy()
                    copy_elements([each.copy], old.arrays[each.rank, each.source], found)
                    assert np.sum(before != found) == each.copy.elements, "an element is copied twice"
            assert found.tolist() == [element if element in held else -1 for element in expected]
            missing = [cut(values[each.piece.tensor], each.piece) for each in plan.missing if each.target == name]
            assert sorted(joined(missing)) == sorted(e for e in expected if e >= 0 and e not in held)


@given(reshapes())
def test_an_index_reads_as_it_was_written(drawn):
    _, old, _, _ = drawn
    for rank, index in old.indexes.items():
        assert read_index(unpack(pack(plain_index(index)))) == index
        index.check({name: old.arrays[rank, name].shape for name in index.stored})


def test_a_copy_of_rows_of_a_matrix_cut_by_columns_is_one_strided_copy():
    (copy,) = overlap(Block("t", (0, 2), (4, 2)), Range("t", 0, 24), (4, 6))
    assert copy == Copy((4, 2), 2, (6, 1), 0, (2, 1))


@given(two_pieces())
def test_pieces_that_share_elements_have_areas_that_meet(drawn):
    shape, one, other = drawn
    tensor = LogicalTensor("t", "F32", shape)
    shared = set(cut(numbered(shape), one).tolist()) & set(cut(numbered(shape), other).tolist())
    assert area_of(one, tensor).meets(area_of(other, tensor)) or not shared


def test_the_area_of_a_shard_is_the_shard_however_it_is_cut():
    """So that nobody else's index is read for it."""
    tensor = LogicalTensor("t", "F32", (12, 4, 3))
    for axis, parts in ((0, 4), (1, 4), (2, 3)):
        cuts = [[0, 0, 0] for _ in range(parts)]
        lengths = [*tensor.shape]
        lengths[axis] //= parts
        for rank, each in enumerate(cuts):
            each[axis] = rank * lengths[axis]
        areas = [area_of(Block("t", tuple(each), tuple(lengths)), tensor) for each in cuts]
        if axis < 2:
            assert sum(one.meets(other) for one in areas for other in areas) == parts


class Old:
    """Ranks that saved, as Holders asks for them; what was read is counted."""

    def __init__(self, indexes):
        made = {rank: outline_of(index) for rank, index in indexes.items()}
        self.outlines = {rank: outline for rank, (outline, _) in made.items()}
        self.lists = {
            each.tensors: msgspec.msgpack.decode(told, type=list[LogicalTensor]) for each, told in made.values()
        }
        self.unread, self.was_read, self._indexes = set(), set(), indexes

    def digest(self, old):
        return checksum_of(pack(plain_index(self._indexes[old])))

    def index(self, old):
        return self._indexes[old] if self.digest(old) in map(self.digest, self.was_read) else None

    async def find_shared(self, olds):
        return False

    async def read(self, olds):
        self.was_read |= set(olds)


@given(reshapes())
def test_what_is_chosen_by_outlines_is_all_that_somebody_has(drawn):
    _, old, new, gone = drawn
    kept = {rank: index for rank, index in old.indexes.items() if rank not in gone}
    for rank, wanted in new.indexes.items():
        whole = assemble(wanted, Holdings(kept), rank=rank)
        holders = Holders(Old(kept), wanted, rank, {})
        plan = asyncio.run(holders.cover(kept.keys()))
        assert elements(plan.missing) == elements(whole.missing)
        assert sum(each.copy.elements for each in plan.transfers) == sum(e.copy.elements for e in whole.transfers)
        assert holders.plan(kept.keys()) == plan
        assert not any(map(holders.may_have, lacking(plan)))


def elements(missing):
    found = {}
    for each in missing:
        if each.piece.elements:
            found[each.target] = found.get(each.target, 0) + each.piece.elements
    return found

"""What of which rank's shards belongs where in the whole model, by the logical index that each base carries."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.archive.indexes import StoredIndex, read_indexes
from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.format.container import TensorSpec
from tiercheck.format.index.assemble import Holdings, Transfer, assemble
from tiercheck.format.index.logical import EXTRA, MASTER, LogicalIndex, LogicalTensor, Role
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.types import Fidelity

__all__ = ["DTYPE_NAMES", "Model", "Output", "read_model"]

NAMED_MAX = 3
DTYPE_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""By the name that a user gives, what parameters are exported as; ``model``: as the model had them."""
WIDER = {"F64": frozenset[str](), "F32": {"F64"}, "F16": {"F32", "F64"}, "BF16": {"F32", "F64"}}
"""By the dtype of stored parameters, which others have all of its values."""


@dataclass(frozen=True)
class Output:
    """A tensor of the model as it is exported."""

    spec: TensorSpec
    tensor: LogicalTensor
    stored: str
    """The dtype in which the tiers hold it."""

    @property
    def is_rounded(self) -> bool:
        return self.spec.dtype not in {self.stored, *WIDER.get(self.stored, ())}


@dataclass(frozen=True)
class Model:
    """The whole model, and what each rank brings to it."""

    outputs: tuple[Output, ...]
    transfers: Mapping[int, Mapping[str, Sequence[Transfer]]]
    """By rank, and by its stored tensor."""
    aliases: Mapping[str, str]
    """Other names of tensors (tied weights), and the name under which they are stored."""
    output_of: Mapping[str, str]
    """By a transfer's target, the tensor's name."""

    def rounding(self) -> tuple[Fidelity, tuple[str, ...]]:
        """What the export's dtypes make of the parameters: rounded to other dtypes than the model's own, they are not
        what was trained. And how many are rounded, in words."""
        rounded = [each for each in self.outputs if each.is_rounded]
        counts = Counter((each.stored, each.spec.dtype, each.tensor.dtype) for each in rounded)
        notes = [
            f"{count} tensors are rounded from {stored} to {dtype}; the model has them in {own}"
            for (stored, dtype, own), count in counts.items()
        ]
        is_exact = all(each.spec.dtype == each.tensor.dtype for each in rounded)
        return Fidelity.EXACT if is_exact else Fidelity.APPROXIMATE, tuple(notes)


async def read_model(hierarchy: OpenHierarchy, inventory: Inventory, chosen: Recoverable, dtype: str | None) -> Model:
    """Read every rank's index.

    ``dtype``: of :data:`DTYPE_NAMES`, ``model``, or ``None``: parameters as they are stored, in full precision. Buffers
    are never converted.

    Errors: ``RecoveryError`` for a tensor of which something is missing, or of which nobody knows how it was cut;
    ``ConfigurationError`` for an unknown dtype.
    """
    if dtype not in (None, "model", *DTYPE_NAMES):
        raise ConfigurationError(f"parameters are exported as {', '.join(DTYPE_NAMES)} or model, not {dtype!r}")
    found = await read_indexes(hierarchy, inventory, chosen)
    return await asyncio.to_thread(planned, found, dtype)


def planned(ranks: Mapping[int, StoredIndex], dtype: str | None) -> Model:
    """Errors: ``RecoveryError``."""
    try:
        holdings = Holdings({rank: each.index for rank, each in ranks.items()})
    except ValueError as error:
        raise RecoveryError(f"the ranks do not hold one model: {error}") from None
    tensors = holdings.tensors
    if sliced := sorted({each.name for each in tensors if each.slice_name}):
        raise RecoveryError(
            f"{len(sliced)} tensors were cut into slices by the model's own tensor parallelism, and nobody knows how "
            f"({', '.join(sliced[:NAMED_MAX])}): they cannot be put together"
        )
    wanted = LogicalIndex.of_whole(tensors)
    plan = assemble(wanted, holdings)
    if plan.missing:
        named = "; ".join(map(str, plan.missing[:NAMED_MAX]))
        raise RecoveryError(f"no rank has {named}{'; ...' if len(plan.missing) > NAMED_MAX else ''}")
    transfers: dict[int, dict[str, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    stored_as: dict[str, str] = {}
    for each in plan.transfers:
        transfers[each.rank][each.source].append(each)
        stored_as[each.target] = ranks[each.rank].specs[each.source].dtype
    output_of = {(MASTER if each.trained else EXTRA) + each.name: each.name for each in tensors}
    outputs = []
    for target, name in output_of.items():
        tensor = wanted.tensors[name]
        stored = stored_as.get(target, tensor.dtype)
        outputs.append(Output(TensorSpec(name, exported_as(tensor, stored, dtype), tensor.shape), tensor, stored))
    return Model(tuple(outputs), transfers, holdings.aliases, output_of)


def exported_as(tensor: LogicalTensor, stored: str, dtype: str | None) -> str:
    if dtype is None or tensor.role is Role.BUFFER or stored not in WIDER:
        return stored
    return tensor.dtype if dtype == "model" else DTYPE_NAMES[dtype]

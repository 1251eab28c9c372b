"""Adam and AdamW on the device: all steps of a launch in one read and one write of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.module import DeviceArray, Stream, address_of, check, grid_for
from tiercheck.kernels.division import parts_of
from tiercheck.kernels.reference.adam import VECTOR

__all__ = [
    "MOST_STEPS",
    "SHARED",
    "SparseOnDevice",
    "check_arrays",
    "launches",
    "replay_fused_adam",
    "table_of",
]

MOST_STEPS = 64
"""The most steps of one launch. More steps take several launches."""

THREADS = 256

TILE = 2048
"""Elements of a block of threads, if gradients are sparse. The CUDA source has the same number."""

DENSE = 0xFFFFFFFF
"""In the place of the number of indices, if the gradient is dense. (One that is sparse may have none, and no address.)
The CUDA source has the same number."""

COUPLED, SMALL, DIVIDES = 1, 2, 4
"""Flags of a step. The CUDA source has the same numbers."""

SHARED: Any = [
    ("count", np.uint64),
    ("values", np.uint64, MOST_STEPS),
    ("indices", np.uint64, MOST_STEPS),
    ("sizes", np.uint32, MOST_STEPS),
]

SCALARS = (
    *("decay", "multiplier", "weight1", "weight2", "beta2", "divisor", "reciprocal_low", "eps", "negative_step_size"),
)

STEPS = np.dtype(
    [*SHARED, ("steps", np.dtype([*((name, np.float32) for name in SCALARS), ("flags", np.uint32)]), MOST_STEPS)],
    align=True,
)


@dataclass(frozen=True, eq=False)
class SparseOnDevice:
    """A gradient on the device whose elements at ``indices`` are ``values`` and whose other elements are +0.0.

    ``indices`` (uint32, strictly ascending) and ``values`` (fp32) are 1-D and of one length. The order of the indices
    is not checked, since the host would have to wait for the device. With any other order the result is wrong; nothing
    is written beyond the state.
    """

    indices: DeviceArray
    values: DeviceArray


Gradients = Sequence[DeviceArray | SparseOnDevice]


def replay_fused_adam(
    param: DeviceArray,
    exp_avg: DeviceArray,
    exp_avg_sq: DeviceArray,
    gradients: Gradients,
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: DeviceArray | None = None,
    contracted: bool,
    stream: Stream,
) -> None:
    """:func:`tiercheck.kernels.replay_fused_adam` on the device: the bits of torch's fused **CPU** kernel.

    Every array is 1-D, contiguous, fp32, and one whole tensor; a gradient may be :class:`SparseOnDevice`. The payload
    of a NaN is the device's own. One launch takes up to :data:`MOST_STEPS` steps.

    Raises:
        ConfigurationError: the arrays or the steps do not fit together; nothing was changed.
    """
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if steps and any(step.amsgrad != (max_exp_avg_sq is not None) for step in steps):
        raise ConfigurationError("amsgrad steps, and no others, need max_exp_avg_sq")
    if max_exp_avg_sq is not None:
        state["max_exp_avg_sq"] = max_exp_avg_sq
    check_arrays(state, gradients, steps)
    size = int(param.size)
    vectors = size - size % VECTOR
    for some, of_some in launches(gradients, steps):
        rows = table_of(STEPS, some)
        for row, step in zip(rows["steps"][0], of_some, strict=False):
            fill(row, step)
        sparse = any(isinstance(gradient, SparseOnDevice) for gradient in some)
        kernel, grid = (
            ("replay_adam_sparse", max(1, -(-size // TILE))) if sparse else ("replay_adam", grid_for(size, THREADS))
        )
        arguments = (
            param,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq,
            np.uint64(size),
            np.uint64(vectors),
            np.uint32(contracted),
            rows,
        )
        module.launch("adam", kernel, grid, THREADS, arguments, stream)


def launches(gradients: Gradients, steps: Sequence[AdamStep]) -> Iterator[tuple[Gradients, Sequence[AdamStep]]]:
    for start in range(0, len(steps), MOST_STEPS):
        yield gradients[start : start + MOST_STEPS], steps[start : start + MOST_STEPS]


def table_of(dtype: np.dtype[Any], gradients: Gradients) -> NDArray[np.void]:
    """The argument of a launch by value, with the gradients' addresses and sizes; the steps' scalars are still
    zeros."""
    table = np.zeros(1, dtype)
    table["count"] = len(gradients)
    table["sizes"] = DENSE
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, SparseOnDevice):
            table["indices"][0, index] = address_of(gradient.indices)
            table["sizes"][0, index] = gradient.indices.size
            gradient = gradient.values
        table["values"][0, index] = address_of(gradient)
    return table


def fill(row: np.void, step: AdamStep) -> None:
    c = Coefficients.of(step)
    small = bool(c.weight1 < np.float32(0.5))
    row["decay"] = c.decay if c.decays else np.float32(1)
    row["multiplier"] = c.multiplier
    row["weight1"] = c.weight1 if small else c.weight1 - np.float32(1)
    for name in ("weight2", "beta2", "eps", "negative_step_size"):
        row[name] = getattr(c, name)
    high, row["reciprocal_low"], divides = parts_of(c.root_correction)
    row["divisor"] = c.root_correction if divides else high
    row["flags"] = COUPLED * step.coupled | SMALL * small | DIVIDES * divides


def check_arrays(state: dict[str, DeviceArray], gradients: Gradients, steps: Sequence[AdamStep]) -> None:
    """Errors: ``ConfigurationError`` if a replay cannot work on these arrays in place."""
    if len(gradients) != len(steps):
        raise ConfigurationError(f"a replay needs a gradient a step, not {len(gradients)} for {len(steps)} steps")
    size = int(state["param"].size)
    spans: list[tuple[str, int, int]] = []
    try:
        for name, array in state.items():
            check(name, array, np.float32, size)
            spans.append(span_of(name, array))
        for index, gradient in enumerate(gradients):
            name, values, expected = f"gradients[{index}]", gradient, size
            if isinstance(gradient, SparseOnDevice):
                values, expected = gradient.values, int(gradient.indices.size)
                check(f"{name}.indices", gradient.indices, np.uint32)
                spans.append(span_of(f"{name}.indices", gradient.indices))
            check(name, values, np.float32, expected)
            spans.append(span_of(name, values))
    except ValueError as error:
        raise ConfigurationError(f"a replay works in place on float32 alone: {error}") from error
    for position, (name, start, stop) in enumerate(spans[: len(state)]):
        for other, second_start, second_stop in spans[position + 1 :]:
            if max(start, second_start) < min(stop, second_stop):
                raise ConfigurationError(f"a replay works in place; {name} overlaps {other}")


def span_of(name: str, array: DeviceArray) -> tuple[str, int, int]:
    return name, address_of(array), address_of(array) + int(array.nbytes)

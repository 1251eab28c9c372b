"""What a version of a job would cost on this machine, by the bandwidths that were measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.diagnostics.fit import BASE_NBYTES, JobSize
from tiercheck.diagnostics.gpu import GpuDiagnosis
from tiercheck.types import bytes_text

__all__ = ["Cost", "costs_of"]


@dataclass(frozen=True)
class Cost:
    """One way of a version's bytes. ``ranks`` of a node take it at the same time."""

    what: str
    """``differential``: of each version. ``base``: of a start, and of each base that is captured."""
    place: str
    """``device``: from the GPU into pinned memory; else the tier's URL, which is written to."""
    nbytes: int
    """Of one rank."""
    seconds: float
    """For all ranks of the node, at the bandwidth measured."""
    bytes_per_s: float

    def __str__(self) -> str:
        way = "from the device" if self.place == "device" else f"into {self.place}"
        rate = f"{bytes_text(int(self.bytes_per_s))}/s"
        return f"a {self.what} of {bytes_text(self.nbytes)} a rank takes {self.seconds:.3g} s {way}, at {rate}"

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def costs_of(job: JobSize, gpu: GpuDiagnosis, found: Sequence[Diagnosis]) -> list[Cost]:
    """``found``: the doctor's diagnosis of each tier. What was not measured is left out. Training waits for none of
    these, as long as it takes less than a step (a differential) or an interval (a base)."""
    rates = [("device", gpu.pinned_bytes_per_s), *((each.url, put_rate(each)) for each in found)]
    sizes = (("differential", job.gradient_nbytes * job.parameters), ("base", BASE_NBYTES * job.parameters))
    return [
        Cost(what, place, nbytes, nbytes * job.ranks / rate, rate)
        for place, rate in rates
        for what, nbytes in sizes
        if rate > 0
    ]


def put_rate(found: Diagnosis) -> float:
    """Bytes a second of the largest objects that were put; 0 if none were."""
    puts = [point for point in found.points if point.operation == "put" and point.nbytes]
    return max(puts, key=lambda point: point.nbytes).bytes_per_s if puts else 0.0

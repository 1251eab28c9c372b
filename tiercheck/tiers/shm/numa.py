"""Which NUMA node's memory a process should use, and how its threads come to use it.

A page lies on the node of the thread that first touches it, unless that thread says otherwise. The shm driver
allocates and touches all of a segment's pages itself, so it is enough that the threads it does that in say so
(``set_mempolicy``): its own for good, and others while they are in the driver. Preferred, so that a full node is no
error. Source: Linux, ``set_mempolicy(2)``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

__all__ = ["Locality", "node_of_cpus", "node_of_device", "numa_nodes"]

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_PREFERRED = 1
MASK_WORDS = 16
"""Of 64 nodes each: as many nodes as any kernel is built for."""
Mask = ctypes.c_ulong * MASK_WORDS


def numa_nodes() -> dict[int, frozenset[int]]:
    """The nodes that have memory, each with its CPUs; empty if the system does not say."""
    try:
        with_memory = parse_list((NODES / "has_memory").read_text())
        return {node: parse_list((NODES / f"node{node}" / "cpulist").read_text()) for node in sorted(with_memory)}
    except (OSError, ValueError):
        return {}


def parse_list(text: str) -> frozenset[int]:
    """``"0-2,8"`` as a set. ``ValueError`` otherwise."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def node_of_cpus(cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> int | None:
    """The node that all of ``cpus`` belong to; ``None`` if they belong to several, or there is only one."""
    homes = [node for node, its in nodes.items() if cpus & its]
    return homes[0] if len(homes) == 1 and len(nodes) > 1 else None


def node_of_device(bus_id: str | None, nodes: Mapping[int, frozenset[int]]) -> int | None:
    """The node that a PCI device is attached to; ``None`` if that is not known, or there is only one."""
    if bus_id is None or len(nodes) < 2:
        return None
    try:
        node = int((DEVICES / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node in nodes else None


class Locality:
    """``mode`` ``auto``: segments come from the node of the GPU, or else of the CPUs this process is bound to."""

    def __init__(self, mode: str) -> None:
        self._nodes = numa_nodes() if mode == "auto" else {}
        self._cpus = frozenset(os.sched_getaffinity(0))
        self.node = node_of_cpus(self._cpus, self._nodes)
        self.text = self._text(mode)
        self._thread = threading.local()

    def near_device(self, bus_id: str | None) -> None:
        """A GPU's node wins over that of the CPUs: its copies are what the memory is for."""
        node = node_of_device(bus_id, self._nodes)
        if node is not None:
            self.node = node
            self.text = f"node {node} (the GPU's)"

    def apply(self) -> None:
        """Have the calling thread, one of the driver's own, take its memory from the node."""
        if self.node is not None and getattr(self._thread, "node", None) != self.node:
            self._thread.node = self.node
            refusal = prefer_node(self.node)
            if refusal:
                self.text = f"any node (set_mempolicy: {refusal})"

    def applied(self) -> AbstractContextManager[None]:
        """The same for a thread of somebody else's, which has its own policy back in the end."""
        policy = None if self.node is None else memory_policy()
        if policy is None:  # nothing to prefer, or nothing that could be put back
            return nullcontext()
        return self._applied(policy)

    @contextmanager
    def _applied(self, policy: tuple[int, ctypes.Array[ctypes.c_ulong]]) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            self._thread.node = None
            set_memory_policy(*policy)

    def _text(self, mode: str) -> str:
        if mode != "auto":
            return "off"
        if self.node is not None:
            return f"node {self.node} (this process's CPUs)"
        return "any node (this process runs on several)" if len(self._nodes) > 1 else "one node"


def prefer_node(node: int) -> str | None:
    """Have the calling thread take fresh memory from ``node``, if it has some; returns why that was refused."""
    if not 0 <= node < 64 * MASK_WORDS:
        return f"no such node: {node}"
    mask = Mask()
    mask[node // 64] = 1 << node % 64
    return set_memory_policy(MPOL_PREFERRED, mask)


def set_memory_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> str | None:
    """Of the calling thread; returns why that was refused."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"not known for {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, mode, ctypes.byref(mask), 64 * MASK_WORDS + 1):
        return os.strerror(ctypes.get_errno())
    return None


def memory_policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]] | None:
    """Mode and nodes of the calling thread's policy; ``None`` if the system does not say."""
    number = GET_MEMPOLICY.get(platform.machine())
    mode, mask = ctypes.c_int(), Mask()
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, ctypes.byref(mode), ctypes.byref(mask), 64 * MASK_WORDS + 1, None, 0):
        return None
    return mode.value, mask

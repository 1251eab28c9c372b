"""The model, whole and under its own names, whoever held which part of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import tiercheck
from tests.archived import LAST, Left, bits
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.archive.export import target as export_target
from tiercheck.archive.export import write
from tiercheck.archive.indexes import StoredIndex
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, ConfigurationError, RecoveryError
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Padding, Range, Role
from tiercheck.hierarchy import Hierarchy
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity, StateProvider, copy_into
from tiercheck.tiers.memory import MemoryDriver

SHAPES = {"embedding.weight": (3, 5), "head.bias": (4,)}
ELEMENTS, WORLD = 19, 2
PART = 10
"""Each rank's; the last element of the second one is padding."""
STEPS = 6


class Partition(StateProvider):
    """A rank's part of a model that is flattened, as ZeRO does it: masters in fp32 of a model in bf16."""

    def __init__(self, rank: int) -> None:
        start = rank * PART
        self.flat = torch.nn.Parameter(torch.nn.functional.pad(initial(), (0, 1))[start : start + PART].clone())
        self.optimizer = torch.optim.AdamW([self.flat], lr=1e-2)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.rank = rank

    def identity(self) -> Identity:
        return Identity.of("flat", self, OptimizerIdentity.of(self.optimizer, torch.device("cpu")))

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {"group0.partition": self.flat.detach()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {"steps": self.steps}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        state = self.optimizer.state.get(self.flat)
        return {"group0.partition": dict(state)} if state else {}

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}]

    def host_state(self) -> dict[str, Any]:
        return {}

    def index(self) -> LogicalIndex:
        tensors = {name: LogicalTensor(name, "BF16", shape, trained=True) for name, shape in SHAPES.items()}
        steps = LogicalTensor("steps", "I64", (), Role.BUFFER)
        first, second = tensors
        pieces = {
            0: (Range(first, 0, 10),),
            1: (Range(first, 10, 5), Range(second, 0, 4), Padding(1)),
        }
        stored = {"master/group0.partition": pieces[self.rank], "extra/steps": (Range("steps", 0, 1),)}
        held = {piece.tensor for piece in pieces[self.rank] if isinstance(piece, Range)}
        known = {name: tensor for name, tensor in tensors.items() if name in held}
        tied = {} if self.rank else {"head.tied": "embedding.weight"}
        return LogicalIndex({**known, "steps": steps}, stored, tied)

    def load(self, *, masters: Any, optimizer_state: Any, extras: Any, hyperparameters: Any) -> None:
        copy_into(self.masters(), masters)

    def apply(self, gradients: Any, hyperparameters: Any) -> None:
        raise AssertionError("nothing is replayed here")

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        pass


def initial() -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))


def gradient(version: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(version))


def reference(version: int) -> dict[str, torch.Tensor]:
    """The model after so many steps, trained whole."""
    flat = torch.nn.Parameter(initial())
    optimizer = torch.optim.AdamW([flat], lr=1e-2)
    for each in range(1, version + 1):
        flat.grad = gradient(each)
        optimizer.step()
    parts = dict(zip(SHAPES, flat.detach().split([15, 4]), strict=True))
    return {name: part.view(SHAPES[name]) for name, part in parts.items()} | {"steps": torch.tensor(version)}


@pytest.fixture(scope="module")
def flat_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a job of two ranks left, each of which trains its part of a flattened model."""
    url = f"nvme://{tmp_path_factory.mktemp('flat')}/run?survives=rack"
    memory = f"flat-{uuid.uuid4().hex}"

    def act(group: SimulatedGroup) -> None:
        provider = Partition(group.rank)
        config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
        hierarchy = Hierarchy.of(f"memory://{memory}-{group.rank}", url)
        with Checkpointer(provider, hierarchy, group=group, config=config) as checkpointer:
            for version in range(1, STEPS + 1):
                start = group.rank * PART
                provider.flat.grad = torch.nn.functional.pad(gradient(version), (0, 1))[start : start + PART].clone()
                checkpointer.capture(version, {"group0.partition": provider.flat.grad})
                provider.optimizer.step()
                provider.steps += 1
                checkpointer.stepped(version)
                checkpointer.complete(version)
                checkpointer.begin_iteration()

    assert on_all_ranks(WORLD, act) == [None] * WORLD
    for rank in range(WORLD):
        MemoryDriver.forget(f"{memory}-{rank}")
    return url


@pytest.mark.parametrize("version", [4, STEPS])
def test_flat_partitions_become_the_models_tensors_at_any_version(
    flat_url: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "WINDOW_NBYTES", 16)
    with tiercheck.open(flat_url) as archive:
        made = archive.export(tmp_path / "model", version=version)
        assert (made.fidelity, made.notes, made.version) == ("exact", (), version)
        found, expected = load_file(tmp_path / "model"), reference(version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
        # Without differentials, and with them, the padding belongs to nobody.
        own = archive.export(tmp_path / "bf16", version=version, dtype="model")
        assert (own.fidelity, own.notes) == (
            "exact",
            ("2 tensors are rounded from F32 to BF16; the model has them in BF16",),
        )
        assert archive.export(tmp_path / "fp16", version=version, dtype="fp16").fidelity == "approximate"
        halves = load_file(tmp_path / "bf16")
        assert all(torch.equal(halves[name], expected[name].to(torch.bfloat16)) for name in SHAPES)
        assert halves["steps"].dtype is torch.int64
        assert made.aliases == {"head.tied": "embedding.weight"}
    with safe_open(tmp_path / "model", "pt") as file:
        assert file.metadata() == {"format": "pt", "tiercheck": f"version {version} of generation 1, exact"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_format_is_read_by_its_own_library(flat_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(STEPS)
    monkeypatch.setattr(write, "FILE_NBYTES_MAX", 60)
    with tiercheck.open(flat_url) as archive:
        archive.export(tmp_path / "model.pt", "torch")
        archive.export(tmp_path / "hub", "huggingface")
        archive.export(tmp_path / "dcp", "dcp")
    whole = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(whole.pop("head.tied"), expected["embedding.weight"])
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == ELEMENTS * 4 + 8
    files = {name: load_file(tmp_path / "hub" / name) for name in set(index["weight_map"].values())}
    assert len(files) == 2
    hub = {name: files[where][name] for name, where in index["weight_map"].items()}
    dcp = {name: torch.zeros_like(each) for name, each in expected.items()}
    load_dcp(dcp, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for found in (whole, hub, dcp):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_universal_checkpoint_has_what_the_optimizer_had(flat_url: str, tmp_path: Path) -> None:
    """An engine loads it in tests/cluster/layouts/test_universal.py."""
    expected = reference(STEPS)
    with tiercheck.open(flat_url) as archive:
        made = archive.export(tmp_path / "out", "deepspeed")
    assert (made.fidelity, made.tensors) == ("exact", 3)
    assert "1 tensors are not trained (steps)" in made.notes[0]
    where = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    for name, shape in SHAPES.items():
        held = {path.stem: torch.load(path, weights_only=True) for path in (where / "zero" / name).iterdir()}
        assert sorted(held) == ["exp_avg", "exp_avg_sq", "fp32", "step"]
        assert torch.equal(held["fp32"]["param"], expected[name])
        assert (held["exp_avg"]["param"].shape, int(held["step"])) == (shape, STEPS)
    states = torch.load(where / "mp_rank_00_model_states.pt", weights_only=True)
    assert (states["global_steps"], states["module"]["steps"]) == (STEPS, STEPS)
    assert torch.equal(states["module"]["head.tied"], expected["embedding.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("format", ["torch", "deepspeed"])
def test_a_disk_that_fills_up_while_it_is_written_says_so(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    real = Path.open

    def opened(path: Path, mode: str = "r", *more: Any) -> Any:
        written = mode == "wb" and path.name in ("out", "optimizer_state.pt")
        return real(Path("/dev/full") if written else path, mode, *more)

    with tiercheck.open(finished.url) as archive:
        monkeypatch.setattr(Path, "open", opened)
        with pytest.raises(CapacityExceeded, match="full"):
            archive.export(tmp_path / "model", format)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_part_is_lost_is_named_and_the_target_stays_free(flat_url: str, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    root = Path(flat_url.removeprefix("nvme://").partition("?")[0])
    shutil.copytree(root, other)
    for path in other.glob("r00001/*/base/*4.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with tiercheck.open(f"nvme://{other}") as archive:
        with pytest.raises(RecoveryError, match=r"r00001/g000001/base/\d*4.safetensors cannot be read"):
            archive.export(tmp_path / "model")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_damaged_base_is_read_from_another_tier(left: Left, finished: Left, tmp_path: Path) -> None:
    left.flip("r00000/g000002/base/*")
    with tiercheck.open(left.url, finished.url) as archive:
        archive.export(tmp_path / "model", version=12)
    assert bits(load_file(tmp_path / "model")) == finished.weights[0, 12]


def test_what_is_there_is_replaced_only_if_asked(finished: Left, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("mine")
    with tiercheck.open(finished.url) as archive:
        with pytest.raises(ConfigurationError, match="is there already"):
            archive.export(target)
        assert target.read_text() == "mine"
        archive.export(target, overwrite=True)
        assert bits(load_file(target)) == finished.weights[0, LAST]
        archive.export(tmp_path / "hub", "huggingface")
        archive.export(tmp_path / "hub", "huggingface", version=1, overwrite=True)
        assert bits(load_file(tmp_path / "hub/model.safetensors")) == finished.weights[0, 1]
        (tmp_path / "hub" / "config.json").write_text("mine")
        for directory in (tmp_path, tmp_path / "hub"):
            with pytest.raises(ConfigurationError, match=r"something else than an export \((config\.json|hub)\)"):
                archive.export(directory, "huggingface", overwrite=True)
        with pytest.raises(ConfigurationError, match="no directory"):
            archive.export(tmp_path / "nowhere" / "model")
        with pytest.raises(ConfigurationError, match="/proc takes no new directory"):
            archive.export("/proc/model")
        with pytest.raises(ConfigurationError, match="no export format 'pickle'"):
            archive.export(tmp_path / "new", "pickle")
        with pytest.raises(ConfigurationError, match="fp32, bf16, fp16 or model, not 'int3'"):
            archive.export(tmp_path / "new", dtype="int3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "model.safetensors"]


def test_a_full_disk_says_so_and_leaves_nothing(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with tiercheck.open(finished.url) as archive:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityExceeded, match=r"/model cannot be written: the file system is full.* device$"):
            archive.export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_cleared_and_one_that_lives_is_not_disturbed(
    finished: Left, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    work = tmp_path / ".model.partial"
    work.mkdir()
    (work / "model.safetensors").write_bytes(b"half")
    refused: list[BaseException] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with tiercheck.open(finished.url) as other:
                thread_error(lambda: other.export(target), refused)

    with tiercheck.open(finished.url) as archive:
        archive.export(target, progress=second)
    assert "another export is writing" in str(refused[0])
    assert bits(load_file(target)) == finished.weights[0, LAST]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("how", ["interrupted", "killed"])
@pytest.mark.parametrize("format", ["safetensors", "huggingface"])
def test_what_is_being_replaced_comes_back_if_nothing_comes_in_its_place(
    format: str, how: str, finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory takes the place of nothing: the old target goes out of its way, and right then the export ends."""
    target = tmp_path / "model"
    with tiercheck.open(finished.url) as archive:
        archive.export(target, format)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        def replace(*_: object) -> NoReturn:
            raise SystemExit(143)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replace)
            if how == "killed":  # nothing is put in order
                patched.setattr(export_target, "put_back", lambda *_: None)
                patched.setattr(export_target, "clear", lambda *_: None)
            with pytest.raises(SystemExit):
                archive.export(target, "huggingface", version=1, overwrite=True)
        if how == "killed":
            assert not target.exists()
            with pytest.raises(ConfigurationError, match="is there already"):
                archive.export(target, format)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def thread_error(call: Any, errors: list[BaseException]) -> None:
    def run() -> None:
        try:
            call()
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_slices_of_which_nobody_knows_the_cut_are_refused() -> None:
    tensor = LogicalTensor("w", "F32", (2,), trained=True, slice_name="tensor parallel 1 of 2")
    from tiercheck.archive.export.model import planned

    with pytest.raises(RecoveryError, match=r"1 tensors were cut .*\(w\)"):
        planned({0: StoredIndex(LogicalIndex.of_whole([tensor]), {})}, None)

"""Reading a part twice: within bounds, from whoever still has it, and without touching anything before it is whole."""

from __future__ import annotations

import shutil
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import Training
from tests.watched import Tamper, Watched, flipped, rewritten
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import Mismatch, RecoveryError, Transient
from tiercheck.format.container import TensorEntry, parse
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.recovery.reading import landing, patience, reader
from tiercheck.recovery.report import Recovery
from tiercheck.streams.records.snapshot import SnapshotStream
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.wrappers.throttled import Throttle, ThrottledDriver
from tiercheck.types import Fidelity

BATCH = 5


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With one, decoding and replay take turns."""
    number: int = request.param
    monkeypatch.setattr(Place, "threads", number)
    return number


class Wide(Training):
    """Its gradients are a quarter of a mebibyte each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 12800), torch.nn.Linear(12800, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.states = {0: self.parameters()}


class Place:
    """A node's memory that is lost, and directories that are not."""

    threads = 0
    """Of a recovery."""

    def __init__(self, root: Path, durable: int = 1) -> None:
        self.urls = [f"nvme://{root}/durable-{index}?survives=rack" for index in range(durable)]
        self.watched: list[Watched] = []
        self.folder = root / "durable-0"

    def trained(self, last: int, kind: Callable[[], Training] = Training, **config: Any) -> dict[int, bytes]:
        """A life up to version ``last``, every version of which is in every directory; the states it went through."""
        memory = f"reader-{uuid.uuid4().hex}"
        training = kind()
        settings = {"base_every": 1000, "batch": BATCH, **config}
        checkpointer = training.attach(Hierarchy.of(f"memory://{memory}", *self.urls), **settings)
        for version in range(1, last + 1):
            training.step(version)
        checkpointer.close()
        MemoryDriver.forget(memory)
        return training.states

    def held(self) -> dict[str, bytes]:
        """The objects in the first directory."""
        return {str(each): each.read_bytes() for each in self.folder.glob("[!.]*/**/*") if each.is_file()}

    def recovered(
        self, *tampers: Tamper, kind: Callable[[], Training] = Training, **config: Any
    ) -> tuple[Checkpointer, Training]:
        """The next life, with an empty memory; each directory may be tampered with."""

        def tier(index: int, url: str) -> Tier:
            def wrap(driver: Any) -> Watched:
                self.watched.append(Watched(driver, *tampers[index : index + 1]))
                return self.watched[-1]

            return Tier(url, f"durable-{index}", wrap)

        memory = f"memory://reader-{uuid.uuid4().hex}"
        training = kind()
        tiers = [tier(index, url) for index, url in enumerate(self.urls)]
        settings = {"base_every": 1000, "batch": BATCH, "recovery_threads": self.threads, **config}
        checkpointer = training.attach(Hierarchy.of(memory, *tiers), **settings)
        checkpointer.abort()
        return checkpointer, training


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def two_places(tmp_path: Path) -> Place:
    return Place(tmp_path, durable=2)


def report(checkpointer: Checkpointer) -> Recovery:
    assert checkpointer.recovery is not None
    return checkpointer.recovery


def is_batch(key: str, last: int) -> bool:
    return "differential" in key and f"-{last:012d}" in key


def sound(key: str, nth: int, content: bytearray) -> bytearray:
    return content


class TestMemory:
    """Beside the base and the state, what is in memory does not depend on the length of the chain."""

    def test_few_batches_are_alive(self, place: Place, threads: int) -> None:
        """Two; on a busy machine the thread that has read the one before may still be about to let it go."""
        states = place.trained(43, Wide)
        checkpointer, training = place.recovered(kind=Wide)
        assert training.parameters() == states[43]
        (tier,) = place.watched
        (base,) = (self.nbytes(place, key) for key in tier.reads if "base" in key)
        batches = [self.nbytes(place, key) for key in tier.reads if "differential" in key]
        assert len(batches) == 9
        assert sum(batches) > 10 << 20, "all of them would be far more"
        assert tier.peak_bytes <= base + 3 * max(batches)
        assert report(checkpointer).replayed == 43

    def test_what_is_read_twice(self, place: Place, threads: int) -> None:
        """All but the base, and the batches that are verified last and replayed first."""
        place.trained(22)
        checkpointer, _ = place.recovered()
        (tier,) = place.watched
        differentials = sorted(key for key in tier.reads if "differential" in key)
        assert [tier.reads[key] for key in differentials] == [1, 1, 2, 2, 2]
        assert [count for key, count in tier.reads.items() if "base" in key] == [1]
        shards = {key: count for key, count in tier.reads.items() if not key.startswith("job/lineage")}
        twice = sum(self.nbytes(place, key) * count for key, count in shards.items())
        assert report(checkpointer).read_bytes == twice

    def test_what_is_decoded_is_bounded_as_well(self, place: Place, threads: int) -> None:
        """Decoded, an int8 gradient is four times as large. NumPy's memory is traced, that of the copies included."""
        place.trained(40, Wide, codec="int8")
        tracemalloc.start()
        try:
            place.recovered(kind=Wide)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        gradient = 4 * (6 * 12800 + 1)
        batch = BATCH * gradient
        encoded = 0.27 * batch
        # The base, and the one the new generation begins with; and what the watched tier makes of one read.
        others = 4 * gradient + 3 * encoded
        assert peak <= others + 2 * (batch + encoded)
        assert peak < 40 * gradient * 0.6, "the whole chain, decoded, would be far more"

    def test_long_runs_of_sparse_gradients_take_no_more(self, place: Place, threads: int) -> None:
        """In closed form many steps are replayed at once, in the memory of a few dense gradients."""
        # Replayed by the same kernels as the next life, so that they are compiled before anything is traced.
        place.trained(60, Wide, codec="sparse", exact_replay=False)
        tracemalloc.start()
        try:
            checkpointer, _ = place.recovered(kind=Wide, codec="sparse", exact_replay=False)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert report(checkpointer).replayed == 60
        assert any("closed form" in note for note in report(checkpointer).notes)
        gradient = 4 * (6 * 12800 + 1)
        assert peak <= 4 * gradient + 2 * BATCH * gradient, "the base, the new one, and two runs of dense gradients"

    def test_few_objects_stay_mapped(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each holds a descriptor, and a job may have made thousands of versions since its last base."""
        monkeypatch.setattr(reader, "MAPPED_MAX", 3)
        training, url = Wide(), f"shm://{name}"
        checkpointer = training.attach(Hierarchy.of(url), base_every=1000)
        for version in range(1, 41):
            training.step(version)
        checkpointer.abort()
        counts: Counter[str] = Counter()
        get = ShmDriver.get

        async def counted(driver: ShmDriver, key: str, **options: Any) -> memoryview:
            counts[key] += 1
            return await get(driver, key, **options)

        monkeypatch.setattr(ShmDriver, "get", counted)
        again = Wide()
        checkpointer = again.attach(Hierarchy.of(url), base_every=1000)
        assert again.parameters() == training.states[40]
        read = [count for key, count in counts.items() if "differential" in key]
        assert (len(read), min(read), max(read)) == (40, 1, 2)
        assert read.count(1) <= 16, "the batches that are replayed first, and three more"
        checkpointer.abort()

    @staticmethod
    def nbytes(place: Place, key: str) -> int:
        return (place.folder / key).stat().st_size


class TestDamageBetweenTheTwoReads:
    @pytest.mark.parametrize("last", [15, 20, 23])
    def test_the_other_copy_is_taken(self, two_places: Place, threads: int, last: int) -> None:
        states = two_places.trained(23)

        def tamper(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if nth == 2 and is_batch(key, last) else content

        checkpointer, training = two_places.recovered(tamper, sound)
        assert (checkpointer.version, training.parameters()) == (23, states[23])
        ((key, tier, why),) = report(checkpointer).quarantined
        assert is_batch(key, last)
        assert tier == "durable-0"
        assert "fails its checksum" in why
        # What the damaged batch held, and nothing twice.
        versions = [each for key, _ in report(checkpointer).sources for each in versions_of(key)]
        assert versions == list(range(1, 24))
        assert {tier for key, tier in report(checkpointer).sources if is_batch(key, last)} == {"durable-1"}

    def test_without_another_copy_the_state_is_an_older_one_and_whole(self, place: Place, threads: int) -> None:
        states = place.trained(23)

        def tamper(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if nth == 2 and is_batch(key, 20) else content

        checkpointer, training = place.recovered(tamper)
        assert (checkpointer.version, training.parameters()) == (15, states[15])
        assert [is_batch(key, 20) for key, _, _ in report(checkpointer).quarantined] == [True]
        (tier,) = place.watched
        assert [count for key, count in tier.reads.items() if "base" in key] == [1], "it was kept"

    def test_another_shard_in_its_place(self, two_places: Place) -> None:
        """It is sound, and of the same key; but it is not what was verified."""
        states = two_places.trained(15)

        def zeros(entry: TensorEntry) -> TensorEntry:
            return replace(entry, data=bytes(len(entry.data)), checksum=None)

        def tamper(key: str, nth: int, content: bytearray) -> bytes:
            return rewritten(content, tensors=zeros) if nth == 2 and is_batch(key, 15) else bytes(content)

        checkpointer, training = two_places.recovered(tamper, sound)
        assert training.parameters() == states[15]
        ((_, _, why),) = report(checkpointer).quarantined
        assert "replaced after it was verified" in why

    def test_whatever_goes_bad_the_state_is_one_there_was(self, two_places: Place) -> None:
        """Nothing can be read a second time, and the other place never had anything sound."""
        states = two_places.trained(15)

        def cut(key: str, nth: int, content: bytearray) -> bytearray:
            return content[:100] if nth == 2 else content

        def rotten(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if "differential" in key else content

        checkpointer, training = two_places.recovered(cut, rotten)
        assert (checkpointer.version, training.parameters()) == (0, states[0])
        assert {tier for _, tier, _ in report(checkpointer).quarantined} == {"durable-0", "durable-1"}


def versions_of(key: str) -> range:
    stem = key.split("/")[-1].partition(".")[0]
    if "differential" not in key:
        return range(0)
    first, _, last = stem.partition("-")
    return range(int(first), int(last or first) + 1)


class TestBeforeAnythingIsTouched:
    def test_a_silent_tier_is_left_for_another_one(self, two_places: Place) -> None:
        states = two_places.trained(23)

        def silent(key: str, nth: int, content: bytearray) -> bytearray | None:
            return None if "differential" in key else content

        checkpointer, training = two_places.recovered(silent, sound, deadline_s=3.0)
        assert training.parameters() == states[23]
        assert report(checkpointer).seconds < 3
        assert {tier for key, tier in report(checkpointer).sources if "differential" in key} == {"durable-1"}
        assert all("nothing came within" in why for _, _, why in report(checkpointer).quarantined)

    def test_a_tier_that_falls_silent_during_the_replay(self, two_places: Place) -> None:
        states = two_places.trained(23)

        def silent(key: str, nth: int, content: bytearray) -> bytearray | None:
            return None if nth == 2 else content

        checkpointer, training = two_places.recovered(silent, sound, deadline_s=3.0)
        assert training.parameters() == states[23]
        assert report(checkpointer).quarantined == (), "silence costs no copy"

    def test_a_slow_tier_that_keeps_giving_is_not_silent(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """The base needs three times the deadline, and so does what follows it."""
        states = place.trained(5, Wide)
        monkeypatch.setattr(landing, "LONG_NBYTES", 1)
        monkeypatch.setattr(landing, "WINDOW_NBYTES", 64 << 10)
        monkeypatch.setattr(patience, "BYTES_PER_S_MIN", 100_000)
        slow = Tier(place.urls[0], "durable", lambda driver: ThrottledDriver(driver, Throttle(bytes_per_s=250_000)))
        training = Wide()
        settings = {"base_every": 1000, "batch": BATCH, "deadline_s": 1.0}
        checkpointer = training.attach(Hierarchy.of(f"memory://reader-{uuid.uuid4().hex}", slow), **settings)
        checkpointer.abort()
        assert training.parameters() == states[5]

    def test_a_differential_of_another_state_is_not_used(self, place: Place) -> None:
        place.trained(12)
        fresh, held = Training().parameters(), place.held()

        def renamed(name: str, value: Any) -> Any:
            if name.endswith("/record"):
                value["gradients"] = {f"other.{master}": each for master, each in value["gradients"].items()}
            return value

        def tamper(key: str, nth: int, content: bytearray) -> bytes:
            return rewritten(content, objects=renamed) if is_batch(key, 10) else bytes(content)

        training = Training()
        with pytest.raises(Mismatch, match=r"version 12 was saved whole.*which the state does not have"):
            place.recovered(tamper, kind=lambda: training, on_nothing_left="restart")
        assert (training.parameters(), place.held()) == (fresh, held), "nothing older is restored in its place"

    def test_a_codec_of_another_version_of_this_software_is_told(self, place: Place) -> None:
        place.trained(12)
        fresh = Training().parameters()

        def unknown(name: str, value: Any) -> Any:
            if name.endswith("/record"):
                value["gradients"] = {
                    master: {**each, "codec": "tomorrow"} for master, each in value["gradients"].items()
                }
            return value

        def tamper(key: str, nth: int, content: bytearray) -> bytes:
            return rewritten(content, objects=unknown) if is_batch(key, 10) else bytes(content)

        training = Training()
        memory = f"memory://reader-{uuid.uuid4().hex}"
        tier = Tier(place.urls[0], wrap=lambda driver: Watched(driver, tamper))
        with pytest.raises(Mismatch, match="there is no codec 'tomorrow'"):
            training.attach(Hierarchy.of(memory, tier))
        assert training.parameters() == fresh


def test_a_description_that_decodes_to_nothing(place: Place) -> None:
    """The bytes are those that were written; only decoding them fails, in the middle of the replay."""
    place.trained(23)
    held = place.held()

    def lying(name: str, value: Any) -> Any:
        if name == f"{18:012d}/record":
            value["gradients"] = {
                master: {**each, "scalars": {"odd": 1}} for master, each in value["gradients"].items()
            }
        return value

    def tamper(key: str, nth: int, content: bytearray) -> bytes:
        return rewritten(content, objects=lying) if is_batch(key, 20) else bytes(content)

    with pytest.raises(Mismatch, match=r"version 23 was saved whole.*version 18 cannot be decoded"):
        place.recovered(tamper)
    assert place.held() == held


def of_two_groups(content: bytes | bytearray) -> bytes:
    """A base of a job with two parameter groups; its checksums hold."""

    def doubled(name: str, value: Any) -> Any:
        return {**value, "hyperparameters": value["hyperparameters"] * 2} if name == "optimizer" else value

    return rewritten(content, objects=doubled)


class TestOtherForms:
    """A base that is whole, and not of this job's state, costs itself only, and takes nobody back."""

    def other_form(self, key: str, nth: int, content: bytearray) -> bytes:
        return of_two_groups(content) if "base" in key else bytes(content)

    def test_another_copy_is_waited_for_where_it_cannot_be_read_just_now(self, two_places: Place) -> None:
        states = two_places.trained(12)

        def away(key: str, nth: int, content: bytearray) -> bytes:
            if "base" in key and nth < 4:
                raise Transient("503 slow down")
            return bytes(content)

        checkpointer, training = two_places.recovered(self.other_form, away)
        assert (checkpointer.version, training.parameters()) == (12, states[12])
        ((_, tier, why),) = report(checkpointer).quarantined
        assert (tier, "options for 2 parameter groups, not 1" in why) == ("durable-0", True)

    def test_the_error_that_stays_is_told_with_the_form_of_the_other_copy(self, two_places: Place) -> None:
        two_places.trained(12)

        def away(key: str, nth: int, content: bytearray) -> bytes:
            if "base" in key:
                raise Transient("503 slow down")
            return bytes(content)

        both = r"from tier durable-1: 503 slow down.*; .* in durable-0 cannot be used: it has options for 2 parameter"
        with pytest.raises(RecoveryError, match=both):
            two_places.recovered(self.other_form, away, deadline_s=1.0)

    def test_where_the_other_copy_is_damaged_the_job_is_refused(self, two_places: Place) -> None:
        two_places.trained(12)

        def damaged(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if "base" in key else content

        with pytest.raises(
            Mismatch, match=r"options for 2 parameter groups, not 1 \(rank 0, tier durable-0: r00000/g000001"
        ):
            two_places.recovered(self.other_form, damaged, on_nothing_left="restart")

    def test_an_older_base_leads_to_the_same_version(self, place: Place) -> None:
        states = place.trained(12, base_every=10)

        def newest(key: str, nth: int, content: bytearray) -> bytes:
            return of_two_groups(content) if "base/000000000010" in key else bytes(content)

        checkpointer, training = place.recovered(newest)
        assert (checkpointer.version, training.parameters()) == (12, states[12])
        assert (report(checkpointer).point.anchor, len(report(checkpointer).quarantined)) == (0, 1)


def test_what_was_not_finite_is_told(place: Place) -> None:
    class Diverging(Training):
        def backward(self, version: int) -> None:
            super().backward(version)
            if version == 7:
                self.model[0].weight.grad[0, :2] = torch.tensor([float("nan"), float("inf")])

    place.trained(7, Diverging, codec="sparse")
    checkpointer, _ = place.recovered(kind=Diverging, codec="sparse")
    assert report(checkpointer).fidelity is Fidelity.APPROXIMATE
    encoded, strange = report(checkpointer).notes
    assert encoded == "7 of the 7 versions replayed were encoded by sparse: approximate"
    assert strange == "the gradients of 1 of the 7 versions replayed held 2 values that are not finite"


def test_sources_of_arrays_are_released(place: Place) -> None:
    """Nothing that was read is alive after the recovery."""
    place.trained(12)
    place.recovered()
    assert place.watched[0].live_bytes == 0
    assert np.isfinite(place.watched[0].peak_bytes)


class TestSnapshots:
    """A snapshot stands for the chain: it is read whole, and decoded before anything is touched."""

    @pytest.fixture
    def trained(self, place: Place) -> Training:
        """Base 0 and a snapshot of version 9 are in the directory, and no differential is."""
        training, url = Training(), f"memory://reader-{uuid.uuid4().hex}"
        checkpointer = training.attach(Hierarchy.of(url, *place.urls), base_every=1000, batch=BATCH)
        for version in range(1, 10):
            training.step(version)
        checkpointer.close()
        MemoryDriver.forget(url.removeprefix("memory://"))
        folder = place.folder / "r00000/g000001"
        shutil.rmtree(folder / "differential")
        provider = ModuleProvider(training.model, training.optimizer)
        (base,) = folder.glob("base/*.safetensors")
        stream = SnapshotStream(provider, "snapshot", 1)
        whole = parse(base.read_bytes())
        stream.token = whole.metadata.token
        stream.set_reference_base(whole)
        key = stream.key(1, 9, 0)
        memory = memoryview(bytearray(stream.nbytes_max))
        written = stream.begin(key, memory).finish(skipped=False)
        path = place.folder / str(key)
        path.parent.mkdir(parents=True)
        path.write_bytes(memory[:written])
        return training

    def test_it_is_loaded_and_called_approximate(self, place: Place, trained: Training) -> None:
        checkpointer, training = place.recovered()
        recovery = report(checkpointer)
        assert (recovery.version, recovery.point.anchor, recovery.replayed) == (9, 0, 0)
        assert recovery.fidelity is Fidelity.APPROXIMATE
        assert recovery.notes == ("version 9 is base 0 and a snapshot of what had changed since",)
        assert [key.split("/")[2] for key, _ in recovery.sources] == ["base", "snapshot"]
        start, there, true = (
            np.frombuffer(each, np.float32) for each in (trained.states[0], training.parameters(), trained.states[9])
        )
        assert 0 < np.linalg.norm(there - true) < 0.02 * np.linalg.norm(start - true)

    def test_a_damaged_one_leaves_the_base(self, place: Place, trained: Training) -> None:
        def tamper(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if "snapshot" in key else content

        checkpointer, training = place.recovered(tamper)
        assert (checkpointer.version, training.parameters()) == (0, trained.states[0])
        assert report(checkpointer).fidelity is Fidelity.EXACT
        assert "fails its checksum" in report(checkpointer).quarantined[0][2]

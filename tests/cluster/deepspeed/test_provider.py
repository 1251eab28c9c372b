"""``DeepSpeedProvider`` on real engines: two ranks, many checks a launch.

What is checked lives in ``replay.py`` (load, replay, go on: every bit), ``edges.py`` and
``resume.py`` (the whole way, through the checkpointer and real tiers), in ``kit.py``
(:class:`~tiercheck.testing.providers.StateProviderTests`), in ``pipeline.py`` (stages
that must meet), in ``index.py`` (what of the model each tensor is), and in ``compressed.py`` (the
whole way where training uses the compressed gradients).
"""

from __future__ import annotations

import pytest

from tests.cluster.deepspeed.launches import MARKS, Results, holds, launch
from tests.forks import Forks

pytestmark = MARKS

RANKS, UNEVEN_RANKS = 2, 3

REPLAYS = (
    "zero0-fp32",
    "zero1-fp32",
    "zero2-fp32",
    "zero3-fp32",
    "zero0-bf16",
    "zero1-bf16",
    "zero2-bf16",
    "zero3-bf16",
    "zero3-bf16-unclipped",
    "zero1-bf16-accumulate-fp32",
    "zero2-bf16-unmanaged",
    "zero2-bf16-communicate-fp32",
    "zero0-bf16-fused",
    "zero1-bf16-offload",
    "zero2-fp32-offload-cpu-adam",
    "zero3-bf16-offload-cpu-adam",
    "zero0-fp16",
    "zero1-fp16",
    "zero3-fp16",
    "pipeline-zero0-fp32",
    "pipeline-zero1-bf16",
    "tensor-parallel-zero1-bf16",
)
EDGES = (
    "skipped-zero1-bf16",
    "skipped-zero1-bf16-accumulate-fp32",
    "skipped-zero3-fp32",
    "skipped-zero0-bf16",
    "skipped-zero1-fp16",
    "skipped-zero2-bf16-offload-cpu-adam",
    "skipped-zero0-fp16",
    "skipped-in-a-pipeline",
    "kit-zero1-bf16",
    "half-accumulated",
    "step-said-by-the-loop",
    "scheduler-moved-by-others",
    "base-of-version-zero",
    "another-model",
    "own-checkpoints",
    "data-sampler",
    "model-parallel-generators",
    "extra-state",
    "refused-setups",
    "replicas",
)

ATTACHED = (
    "attached-and-skipping",
    "skipping-around-an-epochs-end",
    "written-after-the-step",
    "set-after-the-step-lr",
    "set-after-the-step-betas",
    "set-after-the-step-buffers",
    "set-after-the-step-loss-scale",
    "block",
    "beside-zero1-fp32-said",
    "beside-zero0-bf16-unsaid",
    "beside-zero3-fp32-said",
    "beside-pipeline-zero1-bf16-unsaid",
    "pipeline-meets-by-the-clock",
    "pipeline-meets-without-a-shared-tier",
    "pipeline-wrapped-by-others",
)

RESUMES = (
    "zero0-fp32-software",
    "zero1-fp32-software",
    "zero2-fp32-software",
    "zero3-fp32-software",
    "zero1-fp32-node",
    "zero3-bf16-rack",
    "zero0-bf16-software",
    "zero1-bf16-software",
    "zero1-bf16-accumulate-fp32-software",
    "zero2-bf16-software",
    "zero3-bf16-software",
    "zero3-bf16-offload-cpu-adam-software",
    "pipeline-zero1-bf16-software",
)

COMPRESSED = (
    "zero2-fp32-feedback",
    "zero0-fp32-compressed",
    "zero1-fp32-compressed",
    "zero2-fp32-compressed",
    "zero3-fp32-compressed",
    "zero0-bf16-compressed",
    "zero2-bf16-compressed",
    "zero3-bf16-compressed",
    "zero1-bf16-accumulate-fp32-compressed",
    "pipeline-zero1-bf16-compressed",
    "tied-layers-refused",
    "tensor-parallelism-refused",
)

INDEXES = (
    "index-zero0-bf16-fused",
    "index-zero1-bf16",
    "index-zero1-bf16-accumulate-fp32",
    "index-zero2-fp32",
    "index-zero3-fp32",
    "index-zero3-bf16",
    "index-of-slices",
    "index-zero2-bf16-round-robin",
    "index-pipeline-with-tied-layers",
)


@pytest.fixture(scope="module")
def replays(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("replays"), "worker", "replays", ranks=RANKS)


@pytest.fixture(scope="module")
def edges(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("edges"), "worker", "edges", ranks=RANKS)


@pytest.fixture(scope="module")
def attached(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("attached"), "worker", "attached", ranks=RANKS)


@pytest.fixture(scope="module")
def resumes(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("resumes"), "worker", "resumes", ranks=RANKS)


@pytest.fixture(scope="module")
def compressed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("compressed"), "worker", "compressed", ranks=RANKS)


@pytest.fixture(scope="module")
def indexes(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("indexes"), "worker", "indexes", ranks=UNEVEN_RANKS)


@pytest.mark.parametrize("check", REPLAYS)
def test_load_replay_and_go_on_is_the_uninterrupted_run(replays: Results, check: str) -> None:
    holds(replays, check)


@pytest.mark.parametrize("check", EDGES)
def test_edge(edges: Results, check: str) -> None:
    holds(edges, check)


@pytest.mark.parametrize("check", ATTACHED)
def test_what_a_loop_does_beside_its_steps_is_resumed(attached: Results, check: str) -> None:
    holds(attached, check)


@pytest.mark.parametrize("check", RESUMES)
def test_attach_fail_attach_again_and_go_on(resumes: Results, check: str) -> None:
    holds(resumes, check)


@pytest.mark.parametrize("check", COMPRESSED)
def test_train_on_compressed_gradients_fail_and_go_on(compressed: Results, check: str) -> None:
    holds(compressed, check)


@pytest.mark.parametrize("check", INDEXES)
def test_the_indexes_of_all_ranks_tell_the_whole_model_bit_for_bit(indexes: Results, check: str) -> None:
    """On two ranks every case of :data:`REPLAYS` tells it too."""
    holds(indexes, check)


def test_every_check_of_the_worker_is_listed_here(
    replays: Results, edges: Results, attached: Results, resumes: Results, compressed: Results, indexes: Results
) -> None:
    assert set(attached[0]) <= set(ATTACHED)
    assert set(indexes[0]) <= set(INDEXES)
    assert set(compressed[0]) <= set(COMPRESSED)
    assert set(resumes[0]) <= set(RESUMES)
    assert set(replays[0]) <= set(REPLAYS)
    assert set(edges[0]) <= set(EDGES)

"""What each rank of ``test_provider`` runs: every check of one launch, one after another.

Arguments: ``DIRECTORY (replays | edges | attached | resumes | compressed | indexes | CHECK)...``; writes
``DIRECTORY/r{rank}.json``: for each check the list of what did not hold.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch

from tests.cluster.deepspeed.compressed import compressed
from tests.cluster.deepspeed.edges import EDGES
from tests.cluster.deepspeed.harness import CASES, deepspeed
from tests.cluster.deepspeed.index import INDEXES
from tests.cluster.deepspeed.pipeline import meetings
from tests.cluster.deepspeed.replay import check_case
from tests.cluster.deepspeed.resume import resumes
from tests.forks import join
from tests.servers.agents import EAGER

FAILURES = ("-software", "-node", "-rack")
Check = Callable[[], Iterable[str]]


def main() -> None:
    directory, chosen = Path(sys.argv[1]), sys.argv[2:]
    sys.path.insert(0, str(EAGER))  # a fold process that stands back may need minutes to import torch
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    replays: dict[str, Check] = {name: lambda case=case: check_case(case) for name, case in CASES.items()}
    attached = {**resumes(directory), **meetings(directory)}
    lossy = compressed(directory)
    checks = {**replays, **EDGES, **attached, **lossy, **INDEXES}
    sets = {
        "replays": list(replays),
        "edges": list(EDGES),
        "attached": [name for name in attached if not name.endswith(FAILURES)],
        "resumes": [name for name in attached if name.endswith(FAILURES)],
        "compressed": list(lossy),
        "indexes": list(INDEXES),
    }
    if chosen == ["replays"]:  # by kernels; the other sets as a user's jobs, which are as small, call the optimizer
        importlib.import_module("tests.small_states")
    results = {}
    for name in [check for each in chosen for check in sets.get(each, [each])]:
        try:
            results[name] = list(checks[name]())
        except BaseException:  # the other rank may wait for this one in a collective: end both
            results[name] = [traceback.format_exc()]
            raise
        finally:
            (directory / f"r{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
        # DeepSpeed collects the garbage several times an engine: not of what this check has imported.
        gc.collect()
        gc.freeze()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

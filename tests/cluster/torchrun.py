"""A rank of a script that torchrun would launch, on a port that is free. Arguments: the script and its own."""

from __future__ import annotations

import runpy
import sys

import torch.distributed as dist

from tests.forks import join


def main() -> None:
    join()
    dist.init_process_group = lambda backend: None  # it has joined
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()

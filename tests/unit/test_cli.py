"""The command line is an extra: the library does without, and the command says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

UNIMPORTABLE = "import sys; sys.modules.update(dict.fromkeys(('rich', 'typer')))\n"
JOB = """
import torch
import tiercheck
from tiercheck import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.tiers.registry import schemes

assert schemes().keys() >= {"memory", "nvme", "s3", "shm"}, schemes()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
with attach(model, optimizer, Hierarchy.of("memory://process", f"nvme://{sys.argv[1]}")) as checkpointer:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpointer.end_iteration()
print("attached, version", checkpointer.version)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", UNIMPORTABLE + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_library_lists_drivers_and_attaches_without_the_command_line(tmp_path: Path) -> None:
    done = run(JOB, str(tmp_path))
    assert done.stdout.splitlines()[-1:] == ["attached, version 1"], done.stderr


@pytest.mark.parametrize("name", ["rich", "typer"])
def test_the_command_without_its_extra_says_in_one_line_what_to_install(name: str) -> None:
    program = f"sys.modules.pop({'typer' if name == 'rich' else 'rich'!r})\n"
    done = run(program + "from tiercheck.cli import main; main()")
    assert done.returncode == 2
    assert done.stderr == f"error: the tiercheck command needs {name}: pip install 'tiercheck[cli]'\n"


HANGING = """
import sys, threading
from tiercheck.tiers.posix.directories.local import ObjectDirectory
from tiercheck.cli import script

ObjectDirectory.prepare_to_read = lambda _: threading.Event().wait()
sys.argv = ["tiercheck", "ls", "nvme:///tmp", "--deadline-s", "3"]
script()
"""


def test_a_command_that_gives_up_on_a_mount_ends_though_the_mount_hangs() -> None:
    command = [sys.executable, "-c", HANGING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "it could not be opened within 3 s" in done.stderr


def test_plugins_lists_drivers_and_policies() -> None:
    command = [sys.executable, "-m", "tiercheck.cli", "plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert {"memory", "nvme", "s3"} <= {each["scheme"] for each in found["drivers"]}
    policies = {each["name"]: each for each in found["policies"]}
    assert policies["keep_best"]["kind"] == "retention"
    assert policies["keep_best"]["distribution"] == "tiercheck"

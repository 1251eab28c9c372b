"""An environment for each library, so that none decides which versions another one gets.

torch is the one of this process, in all of them: what is compared is how they save, not which torch computes.
"""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Unavailable

__all__ = ["python_with"]

INSTALL_S_MAX = 900.0


def python_with(packages: Sequence[str], folder: Path) -> str:
    """The interpreter of the environment in ``folder``, which is made if it is not there.

    Errors: ``Unavailable`` if a package cannot be installed.
    """
    python, complete = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(packages)
    if complete.exists() and complete.read_text() == wanted:
        return str(python)
    venv.create(folder, clear=True, with_pip=bool(packages))
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "torch.pth").write_text(sysconfig.get_path("platlib"))  # comes after what is installed here
    if packages:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        done = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
        if done.returncode != 0:
            raise Unavailable(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")
    complete.write_text(wanted)
    return str(python)

"""What an import brings along: a process that holds no tensor must not pay for torch."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "deepspeed",
    "numba",
    "llvmlite",
    "matplotlib",
    "pytest",
    "hypothesis",
    "zmq",
    "cupy",
    "aiobotocore",
    "fsspec",
)
LIGHT = (
    "import tiercheck",
    "from tiercheck import errors, Capabilities, CheckpointConfig, Fidelity, Hierarchy, Survives, Tier, TierDriver",
    "import tiercheck; tiercheck.__version__; dir(tiercheck)",
    "import tiercheck.policy.recovery.consensus, tiercheck.policy.commit, tiercheck.policy.watermark",
    "import tiercheck.format.container, tiercheck.replication.mover",
    "import tiercheck.cli.commands",
    "from tiercheck.tiers.registry import make_driver; make_driver('shm://x'); make_driver('nvme:///x')",
)


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``statement``."""
    report = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", LIGHT)
def test_what_holds_no_tensor_imports_no_framework(statement: str) -> None:
    assert not modules_after(statement) & set(HEAVY)


def test_importing_the_package_imports_no_dependency_at_all() -> None:
    brought = modules_after("import tiercheck") - modules_after("")
    assert not {name for name in brought if name not in sys.stdlib_module_names} - {"tiercheck"}


def test_the_front_door_does_import_torch() -> None:
    """Else the tests above could not fail."""
    statement = "import sys; sys.modules['torch'] = None; from tiercheck import Checkpointer"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: "), "it is imported, and is not to be had"
    assert "torch" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("framework", ["torch", "deepspeed"])
def test_an_integration_without_its_framework_says_what_to_install(framework: str) -> None:
    statement = f"import sys; sys.modules[{framework!r}] = None; import tiercheck.integrations.{framework}"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: tiercheck.integrations")
    assert f"pip install 'tiercheck[{framework}]'" in done.stderr.splitlines()[-1]

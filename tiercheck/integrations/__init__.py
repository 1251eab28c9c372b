"""Ways into a training loop. Each is a module of its own, and imports its framework."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("tiercheck.integrations needs torch: pip install 'tiercheck[torch]'", name="torch")

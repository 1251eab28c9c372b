"""``python -m tiercheck.cli``: the ``tiercheck`` command."""

from tiercheck.cli import script

script()

"""Replayable optimizers: which steps a kernel can take in place of the optimizer, bit for bit, and which.

:class:`~tiercheck.streams.optimizers.optimizer.ReplayableOptimizer` is the contract, and
``docs/how-to/write-an-optimizer.md`` says how to write one. Any other optimizer is replayed by calling it.
"""

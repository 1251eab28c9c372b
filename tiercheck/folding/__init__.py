"""A process of its own for the folds, so that neither the trainer nor the agent imports torch for them, waits for a
replay, or gives up a processor to it.

:mod:`~tiercheck.folding.owner` starts it, :mod:`~tiercheck.folding.messages` is what the two say,
:mod:`~tiercheck.folding.server` does the work.
"""

"""The kernels in Numba. They give the bits of :mod:`tiercheck.kernels.reference`.

A kernel is compiled at its first call and cached on disk: call :func:`tiercheck.kernels.warm_up` before training waits
for one. Every kernel releases the GIL and runs on the calling thread; one that takes ``threads`` runs on at most so
many threads. ``fastmath`` is off. ``error_model`` is ``numpy``: with the other one, Numba checks each divisor for zero,
and the loops are not vectorised.
"""

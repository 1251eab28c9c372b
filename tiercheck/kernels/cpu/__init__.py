"""The kernels in Numba. They give the bits of :mod:`tiercheck.kernels.reference`.

Compiled on first use and cached on disk: call :func:`tiercheck.kernels.warm_up` off the critical path. Every
kernel releases the GIL and runs on the calling thread, and on no more than ``threads`` where it takes that.
``fastmath`` is off and ``error_model`` is ``numpy``, without which the check for a zero divisor keeps the loops from
being vectorised.
"""

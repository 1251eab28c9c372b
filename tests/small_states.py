"""Kernels replay the states of tests when a job starts, too. The optimizers would be called, as these are small."""

from tiercheck.streams.tensors import tensor_state

tensor_state.CALLED_ELEMENTS_MAX = 0

"""The kernels in NumPy: slow, readable, and the specification of every other form.

Arrays are 1-D, contiguous and aligned. Everything runs on the calling thread: ``threads`` is accepted and ignored.
"""

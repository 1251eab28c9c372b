"""The kernels in NumPy: slow, readable, and the specification of every other form.

Arrays are 1-D, contiguous and aligned. ``threads`` is taken as everywhere, and nothing runs on another thread.
"""

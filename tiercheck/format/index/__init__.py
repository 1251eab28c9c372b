"""The logical index: what the tensors of a shard mean, so that they can be read under any layout.

- :mod:`~tiercheck.format.index.logical`: the model's tensors, and which pieces of them each stored tensor holds;
- :mod:`~tiercheck.format.index.message`: the form in which a base carries that;
- :mod:`~tiercheck.format.index.boxes`: where two pieces overlap, as copies of elements;
- :mod:`~tiercheck.format.index.assemble`: which elements of which rank's stored tensors another layout takes.
"""

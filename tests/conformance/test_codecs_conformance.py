"""The built-in codecs pass the kit, as anybody's must; and codecs that are almost right fail it."""

from __future__ import annotations

from tiercheck.testing.codecs import CodecTests


class TestExact(CodecTests):
    text = "exact"


class TestExactEntropy(CodecTests):
    text = "exact+entropy"


class TestNonzero(CodecTests):
    text = "nonzero"


class TestInt8(CodecTests):
    text = "int8"


class TestNf4(CodecTests):
    text = "nf4"


class TestOneBit(CodecTests):
    text = "onebit"


class TestSparse(CodecTests):
    text = "sparse"


class TestSparseOfAnotherRatio(CodecTests):
    text = "sparse?ratio=0.25"


class TestAdaptive(CodecTests):
    text = "adaptive?small_elements=300"

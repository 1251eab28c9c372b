"""The codec passes the kit, with each of its options."""

import numpy as np

from tiercheck.streams.codecs import codec
from tiercheck.testing.codecs import CodecTests, encoded, gradient


class TestTruncated(CodecTests):
    text = "truncated"


class TestTwoBytes(CodecTests):
    text = "truncated?kept=2"


def test_it_takes_the_bytes_that_it_keeps() -> None:
    for kept in (2, 3):
        encoding, parts = encoded(codec(f"truncated?kept={kept}"), gradient(1000), "F32")
        assert parts["bytes"].data.nbytes == 1000 * kept
        assert encoding.scalars == {"nonfinite": 0}
    assert codec("truncated?kept=3").text == "truncated"
    values = np.array([1.0, -2.0, 0.5], np.float32)
    encoding, parts = encoded(codec("truncated?kept=2"), values, "F32")
    assert np.array_equal(codec("truncated?kept=2").decode(encoding, parts), values)

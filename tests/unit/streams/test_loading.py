"""What a user says of a checkpoint of another model is refused if it means nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.streams.loading import Loading


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rename": "prefix"}, "rename must be a function of a tensor's name, not 'prefix'"),
        ({"missing": "drop"}, "missing must be 'refuse' or 'keep', not 'drop'"),
        ({"unexpected": True}, "unexpected must be 'refuse' or 'drop', not True"),
        ({"strict": False}, "unknown key 'strict' in the TierCheck configuration: known are rename, missing"),
        ({"mising": "keep"}, "did you mean 'missing'?"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Loading.from_mapping(given)
    assert said in str(error.value)


def test_it_tells_what_it_allows() -> None:
    assert str(Loading()) == "nothing"
    assert str(Loading(rename=str.lower, missing="keep")) == 'rename=..., missing="keep"'
    assert Loading(unexpected="drop").options == {'unexpected="drop"'}

"""What the guide and the plug-ins' pages say is what the plug-ins are."""

from __future__ import annotations

import json
import re

import pytest

from tests.plugins.outside import PLUGINS, ROOT, Outside

GUIDES = {
    "write-a-driver.md": {"sqlite_tier.py", "test_sqlite_tier.py"},
    "write-a-codec.md": {"truncated_codec.py", "test_truncated_codec.py"},
    "write-a-policy.md": {"keep_progress.py", "test_keep_progress.py"},
}
FILE = re.compile(r"^```python\n# file: (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("guide", "files"), GUIDES.items(), ids=GUIDES)
def test_a_guide_shows_the_files_of_the_template(guide: str, files: set[str]) -> None:
    shown = dict(FILE.findall((ROOT / "docs" / "how-to" / guide).read_text(encoding="utf-8")))
    assert shown.keys() == files
    for name, text in shown.items():
        source = (PLUGINS / "tiercheck-template" / name).read_text(encoding="utf-8")
        assert text == source, f"{guide} and the template differ in {name}; the template's is the one to change"


@pytest.mark.cluster
def test_the_pages_show_each_driver_s_options(outside: Outside) -> None:
    program = (
        "import json; from tiercheck.testing.describe import describe; from tiercheck_obstore import stores as s;"
        "print(json.dumps([describe(d.from_url).options_table() for d in (s.AzureDriver, s.GcsDriver)]))"
    )
    readme = (PLUGINS / "tiercheck-obstore" / "README.md").read_text(encoding="utf-8")
    for table in json.loads(outside.run("-c", program).stdout):
        assert table in readme, f"the README should say:\n{table}"

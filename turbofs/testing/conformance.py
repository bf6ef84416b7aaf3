"""The suite that every source passes: what it declares works, and everything else raises NotSupportedError.

    class TestMySource(SourceConformance):
        @asynccontextmanager
        async def make_source(self):
            source = MySource(...)       # its root: a directory that is new for each test
            await source.connect()
            yield source
            await source.aclose()

pytest with pytest-trio's trio_mode collects the class. A pytest fixture of the class (autouse) can put what
`make_source` needs on `self`. A source that cannot write overrides `seed`, to put files there by other means.
"""

from __future__ import annotations

from turbofs.testing.conformance_reading import ReadingConformance
from turbofs.testing.conformance_writers import OpenFileConformance
from turbofs.testing.conformance_writing import WritingConformance


class SourceConformance(ReadingConformance, WritingConformance, OpenFileConformance):
    """All of the suite."""

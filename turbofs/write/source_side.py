"""What the source has of one staged file, as the flusher knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbofs.errors import TurboError
from turbofs.model import FileVersion
from turbofs.write.upload import Upload


class ConflictError(TurboError):
    """The target is not what it was when the writing began."""

    advice = "compare with `turbofs conflicts show`, then publish or drop what was parked"


@dataclass(slots=True)
class SourceSide:
    """What the source has of one staged file."""

    named: bool
    """Whether the source has something of this file under its name."""
    version: FileVersion | None
    generation: int = 0
    """The content of this file that the source has under its name."""
    attributes_generation: int = 0
    upload: Upload | None = None
    lowest_change: int = 1 << 63
    """The lowest offset that changed since the last publication."""
    streaming: bool = False
    streams: bool = True
    """Whether to upload while the file is written; not again after that failed."""
    appended: bool = False
    """Whether this mount has appended in place, or tried: what has grown may be its own bytes."""
    digest: str | None = None
    retired: list[str] = field(default_factory=list)
    """Temporary files whose bytes are still needed, because they were let go here."""
    after: SourceSide | None = None
    """The same name's earlier content, which is promised and comes first: what the source has then is `version` here."""
    recovered: bool = False
    """From an earlier mount: publish only where the target is what it was."""
    resume: tuple[str, FileVersion, bool] | None = None
    """The temporary file that an earlier mount had sent, its version then, and whether that is what is promised."""

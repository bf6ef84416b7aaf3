"""Short real video files for the demo: a square that moves, so that every decoded frame can be checked by looking."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

FRAMES = 48
WIDTH, HEIGHT, SQUARE = 160, 96, 24
CODECS = ("libx264", "libopenh264", "mpeg4")
"""The first that this build of PyAV can encode with."""


def square_left(clip: int, frame: int) -> int:
    """Where the square of the clip's frame begins, in pixels; even, because colour is stored at half the width."""
    return (frame * 2 * (clip + 1)) % (WIDTH - SQUARE) // 2 * 2


def encode(path: Path, clip: int) -> str:
    """Write the clip numbered *clip* to *path*; returns the codec's name."""
    codec = next(name for name in CODECS if name in av.codecs_available)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for frame in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_picture(clip, frame), format="rgb24")))
        container.mux(stream.encode(None))
    return codec


def frames_that_match(path: Path, clip: int) -> int:
    """Decode *path*; how many frames show the square where `encode` drew it, to three pixels."""
    matching = 0
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            bright = frame.to_ndarray(format="gray").mean(axis=0)
            columns = np.flatnonzero(bright > (bright.min() + bright.max()) / 2)
            matching += bool(columns.size) and abs(int(columns[0]) - square_left(clip, number)) <= 3
    return matching


def _picture(clip: int, frame: int) -> npt.NDArray[np.uint8]:
    picture = np.full((HEIGHT, WIDTH, 3), (16, 32, 64), np.uint8)
    left = square_left(clip, frame)
    picture[(HEIGHT - SQUARE) // 2 :][:SQUARE, left : left + SQUARE] = (255, 224, 160)
    return picture

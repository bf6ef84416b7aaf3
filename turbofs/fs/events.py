"""What happens in a mount, told to whoever subscribed over the control socket. Publishing never waits."""

from __future__ import annotations

import trio

_QUEUE_LENGTH = 256  # a slow reader may lag this far; then it is dropped, since nobody waits for it


class EventBus:
    """Events are maps with an `event` key, JSON-able. `publish` may be called by any task of the mount's trio run."""

    def __init__(self) -> None:
        self._subscribers: list[trio.MemorySendChannel[dict[str, object]]] = []

    def subscribe(self) -> trio.MemoryReceiveChannel[dict[str, object]]:
        """Every event from now on; closing the channel ends it. The channel ends early where its reader lags."""
        send, receive = trio.open_memory_channel[dict[str, object]](_QUEUE_LENGTH)
        self._subscribers.append(send)
        return receive

    def publish(self, event: str, **details: object) -> None:
        """Tell all subscribers; one that does not keep up, or has gone, is dropped."""
        for subscriber in list(self._subscribers):
            try:
                subscriber.send_nowait({"event": event, **details})
            except (trio.WouldBlock, trio.BrokenResourceError):
                subscriber.close()
                self._subscribers.remove(subscriber)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

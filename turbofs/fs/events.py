"""What happens in a mount, told to whoever subscribed over the control socket. Publishing never waits."""

from __future__ import annotations

import trio

from turbofs.fs.permissions import oversees

_QUEUE_LENGTH = 256  # a slow reader may lag this far; then it is dropped, since nobody waits for it


class EventBus:
    """Events are maps with an `event` key, JSON-able. `publish` may be called by any task of the mount's trio run."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[int, trio.MemorySendChannel[dict[str, object]]]] = []

    def subscribe(self, uid: int) -> trio.MemoryReceiveChannel[dict[str, object]]:
        """Every event from now on that *uid* may know of.

        Closing the channel ends it; it ends early where its reader lags.
        """
        send, receive = trio.open_memory_channel[dict[str, object]](_QUEUE_LENGTH)
        # Who has gone is noticed here as well: there may never be an event for them.
        self._subscribers = [each for each in self._subscribers if each[1].statistics().open_receive_channels]
        self._subscribers.append((uid, send))
        return receive

    def publish(self, event: str, *, owner_uid: int, **details: object) -> None:
        """Tell *owner_uid*, whose act this is about, and whoever oversees it.

        A subscriber that does not keep up, or has gone, is dropped.
        """
        for subscriber in list(self._subscribers):
            uid, channel = subscriber
            if not oversees(uid, owner_uid):
                continue
            try:
                channel.send_nowait({"event": event, **details})
            except (trio.WouldBlock, trio.BrokenResourceError):
                channel.close()
                self._subscribers.remove(subscriber)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

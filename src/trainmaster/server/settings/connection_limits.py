"""What a connection may cost the server before it is known who is asking."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 128 << 10
"""The address and the headers of a request. Two tokens for other services take 16 KiB each; the parser itself would go
on for as long as there is memory."""
HEAD_WITHIN_S = 30.0
"""How long a connection may be open without a whole head of a request."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 28\r\n\r\nThe headers are too large.\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP whose requests must begin within bounds of size and time."""

    head_within_s = HEAD_WITHIN_S
    _head_bytes = 0
    _in_head = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._relax()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, unless they are more of a head than there can be."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()  # line ends that begin nothing have put an end to the server's own patience

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._deadline is None:
            self._expect()

    def on_headers_complete(self) -> None:
        """The head of a request is there; its body is bounded by whoever reads it."""
        self._in_head = False
        self._relax()
        super().on_headers_complete()

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(self.head_within_s, self._give_up)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

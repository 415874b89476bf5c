from __future__ import annotations

import pytest

from trainmaster.client.event_stream import ServerEvent, parse_events

STREAM = (
    b": hello\n\n"
    b"id: 1\r\nevent: log\r\ndata: first\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    b"event: nothing\n\n"
    b'id: 2\rdata:{"message": "a\xe2\x80\xa8b\xc2\x85c"}\r\r'
    b"data: cut o"
)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, len(STREAM)])
def test_stream_in_chunks_of_any_size_gives_the_same_events(chunk_size: int) -> None:
    chunks = (STREAM[start : start + chunk_size] for start in range(0, len(STREAM), chunk_size))

    assert list(parse_events(chunks)) == [
        ServerEvent(event="log", data="first", id="1"),
        ServerEvent(event="message", data="two\nlines", id="1"),
        ServerEvent(event="message", data='{"message": "a\u2028b\u0085c"}', id="2"),
    ]

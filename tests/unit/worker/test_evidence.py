"""Reading the end of a process's output."""

from __future__ import annotations

import pytest

from trainmaster.worker.verdict import MAX_LINE_CHARACTERS, MAX_LINES, evidence_from, read_tail

PLAIN = b"""\
loading
Traceback (most recent call last):
  File "train.py", line 30, in <module>
    main()
  File "train.py", line 12, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""
CHAINED = b"""\
Traceback (most recent call last):
  File "a.py", line 2, in load
    open("x")
FileNotFoundError: [Errno 2] No such file or directory: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
    load()
RuntimeError: no data
some line of a logger
"""
OF_A_RANK = b"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "ddp.py", line 8, in step
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
GROUPED = b"""\
  + Exception Group Traceback (most recent call last):
  |   File "g.py", line 3, in <module>
  |     run()
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "g.py", line 1, in one
    |     1 / 0
    | ZeroDivisionError: division by zero
    +------------------------------------
"""
SYNTAX = b"""\
  File "bad.py", line 3
    def f(:
          ^
SyntaxError: invalid syntax
"""


@pytest.mark.parametrize(
    ("err", "frame"),
    [
        (PLAIN, 'File "train.py", line 12, in main: ValueError: bad batch'),
        (CHAINED, 'File "a.py", line 5, in <module>: RuntimeError: no data'),
        (
            OF_A_RANK,
            'File "ddp.py", line 8, in step: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB',
        ),
        (GROUPED, 'File "g.py", line 1, in one: ZeroDivisionError: division by zero'),
        (SYNTAX, 'File "bad.py", line 3: SyntaxError: invalid syntax'),
        (b"dd: error writing 'x'\n", None),
        (b"", None),
    ],
    ids=["plain", "chained", "rank", "group", "syntax", "no python", "silent"],
)
def test_evidence_frame_is_the_innermost_of_the_last_traceback(err: bytes, frame: str | None) -> None:
    assert evidence_from(err, b"").frame == frame


def test_evidence_traceback_that_was_cut_off_has_a_frame_without_error() -> None:
    evidence = evidence_from(PLAIN.rpartition(b"ValueError")[0], b"")
    assert evidence.error is None
    assert evidence.frame == 'File "train.py", line 12, in main'


def test_evidence_traceback_on_standard_output_counts_too() -> None:
    evidence = evidence_from(b"warning\n", PLAIN)
    assert evidence.error == evidence.last_lines[-1] == "ValueError: bad batch"


def test_evidence_last_lines_are_the_output_then_the_errors() -> None:
    assert evidence_from(b"e1\ne2\n", b"o1\n\no2\n").last_lines == ("o1", "o2", "e1", "e2")
    assert evidence_from(PLAIN, b"epoch 1\n").last_lines[-1] == "ValueError: bad batch"


def test_evidence_last_lines_are_few_and_short() -> None:
    err = b"".join(b"%d %b\n" % (number, b"x" * 1000) for number in range(100))
    lines = evidence_from(err, b"out\n").last_lines
    assert len(lines) == MAX_LINES
    assert lines[-1].startswith("99 ")
    assert max(map(len, lines)) == MAX_LINE_CHARACTERS


def test_evidence_progress_bar_is_shown_in_its_last_state() -> None:
    assert evidence_from(b"10%\r50%\r100%\nDone \xff\n", b"").last_lines == ("100%", "Done \ufffd")


def test_read_tail_reads_the_end_only(tmp_path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * (1 << 20) + b"end")
    tail = read_tail(str(path))
    assert tail.endswith(b"aend")
    assert len(tail) < 1 << 20
    assert read_tail(str(tmp_path / "missing")) == b""


CRASHED = b"""\
step 3
Fatal Python error: Segmentation fault

Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f11 (most recent call first):
  File "train.py", line 7 in poke
  File "train.py", line 12 in main
  File "train.py", line 30 in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


def test_crash_of_python_itself_is_told_with_its_innermost_frame() -> None:
    found = evidence_from(CRASHED, b"")
    assert found.error == "Fatal Python error: Segmentation fault"
    assert found.frame == 'File "train.py", line 7, in poke: Fatal Python error: Segmentation fault'

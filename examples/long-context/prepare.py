"""Bytes of a book as token ids: train.bin and held.bin, and for each range of positions in a sample
a copy of held.bin whose mask scores that range alone.

    prepare.py BOOK SEQ FOLDER
"""

import struct
import sys
from pathlib import Path


def write(path, ids, scored=None):
    """Ids of 16 bits beside an index with one document; `scored` says which of them are scored."""
    path.write_bytes(b"".join(struct.pack("<H", i) for i in ids))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, len(ids), 0, 0, 1)
    path.with_suffix(".idx").write_bytes(index)
    if scored is not None:
        bits = bytearray((len(ids) + 7) // 8)
        for i in filter(scored, range(len(ids))):
            bits[i // 8] |= 1 << i % 8
        path.with_suffix(".mask").write_bytes(b"ZPPMASK1" + struct.pack("<Q", len(ids)) + bits)


def main():
    book, seq, folder = Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), Path(sys.argv[3])
    # Two samples are held out, each with the token behind it.
    held = 2 * seq + 1
    if len(book) < 3 * held:
        sys.exit(f"{sys.argv[1]}: {len(book)} bytes are too few for samples of {seq}")
    write(folder / "train.bin", book[:-held])
    begin = 0
    for end in sorted({16, 128, min(1024, seq), max(seq // 4, 128), seq}):
        # A target's position is that of the token before it.
        inside = range(begin, end)
        name = f"held-{begin:06}-{end:06}.bin"
        write(folder / name, book[-held:], lambda i: i > 0 and (i - 1) % seq in inside)
        begin = end


main()

"""Writes verses and books, as ids of words.

    book.py FOLDER BOOKS SEQ

A verse repeats a few words: FOLDER/verses.bin teaches to go on with what followed a word before.
Books of 65,536 words go to FOLDER/train.bin: prose about people who have their surnames for one
book. Of 2,048 first names few are frequent and most are rare, as words in any text. A surname is
known from where its first name was met before in the book, and from nowhere else. Of other books,
that are held out, there is a file for each range of positions up to SEQ: beginnings of books, the
same HELD of them in each file and more of short ones, of which the words of the range alone are
scored.
"""

import itertools
import random
import struct
import sys
from bisect import bisect
from pathlib import Path

BOOK, VERSE, FIRST_NAMES, SURNAMES, HELD = 65536, 512, 2048, 64, 3
VOCABULARY = ". met saw heard found".split()
FIRST = len(VOCABULARY)
WORDS = FIRST + FIRST_NAMES + SURNAMES


def shares(n, begin):
    """Of n words the next is met less often than the one before, as in any text."""
    return list(itertools.accumulate(1 / (i + begin) for i in range(n)))


NAMES_MET, WORDS_MET = shares(FIRST_NAMES, 1), shares(WORDS, 9)
WORD_ORDER = random.Random(1).sample(range(WORDS), WORDS)


def one_of(draw, met):
    """A place in a list of shares."""
    return bisect(met, draw.random() * met[-1])


def syllables(n, end):
    """A name for a number, another one for each."""
    begin, middle = "bdfgklmnprstvwyz"[n % 16] + "aeio"[n // 16 % 4], "lmnr"[n // 64 % 4]
    return f"{begin}{middle}{'bdgkmstz'[n // 256]}".capitalize() + end


def word(i):
    """The word of an id."""
    if i < FIRST:
        return VOCABULARY[i]
    i -= FIRST
    if i < FIRST_NAMES:
        return syllables(i, "a")
    return syllables(i - FIRST_NAMES, "son")


def verse(seed):
    """The ids of 8 to 32 words, again and again."""
    draw = random.Random(f"verse {seed}")
    line = [WORD_ORDER[one_of(draw, WORDS_MET)] for _ in range(draw.randrange(8, 33))]
    return (line * (VERSE // len(line) + 1))[:VERSE]


def book(seed, words=BOOK):
    """The ids of a book's first words."""
    draw = random.Random(seed)
    surnames = [FIRST + FIRST_NAMES + draw.randrange(SURNAMES) for _ in range(FIRST_NAMES)]
    # Who is frequent is another one in each book.
    names = draw.sample(range(FIRST_NAMES), FIRST_NAMES)

    def person():
        name = names[one_of(draw, NAMES_MET)]
        return [FIRST + name, surnames[name]]

    ids = []
    while len(ids) < words:
        ids += person() + [draw.randrange(1, FIRST)] + person() + [0]
    return ids[:words]


def write(path, documents, scored=None):
    """Ids of 16 bits with their index; `scored` says of a place in a document whether it counts."""
    ids = [i for document in documents for i in document]
    n, lens = len(documents), [len(document) for document in documents]
    begins = [0, *itertools.accumulate(lens)][:n]
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, n, n + 1)
    index += struct.pack(f"<{n}i{n}q{n + 1}q", *lens, *(2 * at for at in begins), *range(n + 1))
    path.with_suffix(".idx").write_bytes(index)
    if scored is not None:
        bits = bytearray((len(ids) + 7) // 8)
        for begin, length in zip(begins, lens):
            for i in filter(scored, range(length)):
                bits[(begin + i) // 8] |= 1 << (begin + i) % 8
        path.with_suffix(".mask").write_bytes(b"ZPPMASK1" + struct.pack("<Q", len(ids)) + bits)


def main():
    folder, books, seq = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    write(folder / "verses.bin", [verse(seed) for seed in range(8192)])
    write(folder / "train.bin", [book(seed) for seed in range(books)])
    print("a book begins:", " ".join(map(word, book(books, 18))))
    begin = 0
    for end in [2**n for n in range(8, 17) if 2**n <= seq]:
        # And a word that the last one ends with.
        count = max(HELD, min(64, seq // end))
        beginnings = [book(books + n, end) for n in range(count)]
        beginnings[-1] = book(books + count - 1, end + 1)
        path = folder / f"held-{begin:05}-{end:05}.bin"
        write(path, beginnings, lambda i: begin < i < end)
        begin = end


main()

"""Writes books: prose about people who have their surnames for one book, as ids of words.

    book.py FOLDER BOOKS SEQ

BOOKS books of 65,536 words go to FOLDER/train.bin. Of others, that are held out, there is a file
for each range of positions up to SEQ: beginnings of books, of which the words of the range alone
are scored. Of 2,048 first names few are frequent and most are rare, as words in any text. A surname
is known from where its first name was met before in the book, and from nowhere else.
"""

import itertools
import random
import struct
import sys
from bisect import bisect
from pathlib import Path

BOOK, FIRST_NAMES, SURNAMES = 65536, 2048, 128
VERBS = "met saw heard asked told followed found missed thanked forgave helped paid".split()
PLACES = "mill well bridge market harbour church orchard ferry tavern quarry".split()
SMALL = ". the at near and then".split()
VOCABULARY = SMALL + VERBS + PLACES
FIRST = len(VOCABULARY)
# The n-th name is met 1 / n times as often as the first.
SHARES = list(itertools.accumulate(1 / n for n in range(1, FIRST_NAMES + 1)))


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


def book(seed, words=BOOK):
    """The ids of a book's first words."""
    draw = random.Random(seed)
    surnames = [FIRST + FIRST_NAMES + draw.randrange(SURNAMES) for _ in range(FIRST_NAMES)]
    # Who is frequent is another one in each book.
    names = draw.sample(range(FIRST_NAMES), FIRST_NAMES)
    small = {text: VOCABULARY.index(text) for text in SMALL}

    def person():
        name = names[bisect(SHARES, draw.random() * SHARES[-1])]
        return [FIRST + name, surnames[name]]

    def one_of(texts):
        return VOCABULARY.index(draw.choice(texts))

    ids = []
    while len(ids) < words:
        ids += person() + [one_of(VERBS)] + person()
        if draw.random() < 0.3:
            ids += [small[draw.choice(["at", "near"])], small["the"], one_of(PLACES)]
        ids.append(small["."])
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
    write(folder / "train.bin", [book(seed) for seed in range(books)])
    print("a book begins:", " ".join(map(word, book(books, 22))))
    begin = 0
    for end in [2**n for n in range(8, 17) if 2**n <= seq]:
        # As many as have the words of one long sample, and a word that the last one ends with.
        count = min(64, seq // end)
        beginnings = [book(books + n, end) for n in range(count)]
        beginnings[-1] = book(books + count - 1, end + 1)
        path = folder / f"held-{begin:05}-{end:05}.bin"
        write(path, beginnings, lambda i: begin < i < end)
        begin = end


main()

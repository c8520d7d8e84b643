"""Shuffles, votes and reductions of a warp, and atomics."""

import unittest

from emulator import Device, bits


def program(body, registers=""):
    """Thread i reads x[i] into %a and writes %d to y[i]; %t is i, %x and %y the arrays."""
    return f"""
.visible .entry k(.param .u64 px, .param .u64 py) {{
    .reg .b64 %x, %y, %at; .reg .b32 %t, %a, %b, %d; .reg .pred %p; {registers}
    ld.param.u64 %x, [px]; ld.param.u64 %y, [py];
    mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4; add.s64 %at, %x, %at;
    ld.global.u32 %a, [%at];
    {body}
    mul.wide.u32 %at, %t, 4; add.s64 %at, %y, %at;
    st.global.u32 [%at], %d;
    ret;
}}"""


GIVEN = [(i * 37 + 11) % 64 for i in range(32)]
ALL = "0xffffffff"


class Together(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()

    def results(self, body, given=GIVEN, block=32, registers="", room=None):
        d = self.device
        x = d.up(("I", given))
        y = d.up(("I", [0] * (room or block)))
        d.launch(d.kernel(program(body, registers)), [x, y], block=block)
        return d.down(y, "I", room or block)

    def test_shuffles(self):
        x = GIVEN
        tests = {
            f"shfl.sync.bfly.b32 %d, %a, 5, 31, {ALL};": [x[i ^ 5] for i in range(32)],
            f"shfl.sync.idx.b32 %d, %a, 3, 31, {ALL};": [x[3]] * 32,
            f"shfl.sync.up.b32 %d, %a, 2, 0, {ALL};": [x[i - 2 if i >= 2 else i]
                                                      for i in range(32)],
            f"shfl.sync.down.b32 %d, %a, 4, 31, {ALL};": [x[i + 4 if i < 28 else i]
                                                         for i in range(32)],
            # Parts of eight lanes: bits 8 to 12 say which bits of a lane name its part.
            f"shfl.sync.down.b32 %d, %a, 1, 0x181f, {ALL};":
                [x[i + 1 if i % 8 < 7 else i] for i in range(32)],
            f"shfl.sync.idx.b32 %d, %a, 2, 0x181f, {ALL};": [x[i // 8 * 8 + 2] for i in range(32)],
        }
        for body, wanted in tests.items():
            with self.subTest(body):
                self.assertEqual(self.results(body), wanted)

    def test_a_shuffle_says_whether_it_found_a_lane(self):
        body = f"shfl.sync.down.b32 %b|%p, %a, 8, 31, {ALL}; selp.b32 %d, 1, 0, %p;"
        self.assertEqual(self.results(body), [1] * 24 + [0] * 8)

    def test_votes(self):
        mask = sum(1 << i for i, x in enumerate(GIVEN) if x > 30)
        test = "setp.gt.u32 %p, %a, 30;"
        got = self.results(f"{test} vote.sync.ballot.b32 %d, %p, {ALL};")
        self.assertEqual(got, [mask] * 32)
        for kind, wanted in [("any", 1), ("all", 0), ("uni", 0)]:
            body = f"{test} vote.sync.{kind}.pred %p, %p, {ALL}; selp.b32 %d, 1, 0, %p;"
            self.assertEqual(self.results(body), [wanted] * 32, kind)

    def test_reductions_and_matches(self):
        for kind, f in [("add.s32", sum), ("min.u32", min), ("max.u32", max)]:
            got = self.results(f"redux.sync.{kind} %d, %a, {ALL};")
            self.assertEqual(got, [f(GIVEN)] * 32, kind)
        given = [i % 5 for i in range(32)]
        got = self.results(f"match.any.sync.b32 %d, %a, {ALL};", given)
        self.assertEqual(got, [sum(1 << j for j in range(32) if given[j] == v) for v in given])

    def test_lanes_that_parted_meet_at_a_shuffle(self):
        body = f"""
            setp.gt.u32 %p, %a, 30;
            @%p bra LARGE;
            mul.lo.u32 %b, %a, 2;
            bra.uni MEET;
        LARGE:
            add.u32 %b, %a, 1000;
            activemask.b32 %d;
        MEET:
            shfl.sync.bfly.b32 %d, %b, 1, 31, {ALL};"""
        values = [v + 1000 if v > 30 else 2 * v for v in GIVEN]
        self.assertEqual(self.results(body), [values[i ^ 1] for i in range(32)])

    def test_a_vote_of_the_lanes_that_are_left(self):
        body = f"""
            setp.ge.u32 %p, %t, 20;
            @%p exit;
            setp.ge.u32 %p, %t, 0;
            vote.sync.ballot.b32 %d, %p, {ALL};"""
        self.assertEqual(self.results(body), [(1 << 20) - 1] * 20 + [0] * 12)

    def test_atomics_of_all_threads(self):
        given = [(i * 71) % 97 for i in range(200)]
        for kind, wanted in [("add.u32", sum(given)), ("max.u32", max(given)), ("or.b32", 127),
                             ("add.f32", bits(sum(given)))]:
            value = "cvt.rn.f32.u32 %f, %a;" if "f32" in kind else "mov.b32 %f, %a;"
            body = f"{value} add.s64 %at, %y, 800; red.global.{kind} [%at], %f; mov.u32 %d, 0;"
            got = self.results(body, given, 200, ".reg .f32 %f;", 201)[200]
            self.assertEqual(got, wanted, kind)

    def test_an_exchange_gives_back_what_was_there(self):
        body = "add.s64 %at, %y, 128; atom.global.exch.b32 %d, [%at], %a;"
        got = self.results(body, GIVEN, 32, "", 33)
        self.assertEqual(sorted(got), sorted([0, *GIVEN]))

    def test_only_one_thread_wins_a_compare_and_swap(self):
        body = "add.s64 %at, %y, 1024; atom.global.cas.b32 %d, [%at], 0, 1;"
        got = self.results(body, [0] * 256, 256, "", 257)
        self.assertEqual(sorted(got[:256]), [0] + [1] * 255)


if __name__ == "__main__":
    unittest.main()

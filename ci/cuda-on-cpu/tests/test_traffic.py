"""What a launch moves and multiplies, told by a sample of its blocks."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

# Blocks that each write a line of their own and all read one; then blocks that all make one
# product of tensor cores. 32,768 threads each.
WORK = """
from emulator import Device
from test_tensor_cores import MMA
d = Device()
lines = d.kernel('''
.visible .entry lines(.param .u64 from, .param .u64 to) {
    .reg .b64 %a, %o; .reg .b32 %i, %n, %x;
    mov.u32 %n, %tid.x; mul.wide.u32 %o, %n, 4;
    ld.param.u64 %a, [from]; add.s64 %a, %a, %o; ld.global.u32 %x, [%a];
    mov.u32 %i, %ctaid.x; mad.lo.u32 %i, %i, 32, %n; mul.wide.u32 %o, %i, 4;
    ld.param.u64 %a, [to]; add.s64 %a, %a, %o; st.global.u32 [%a], %x;
    ret;
}''', "lines")
d.launch(lines, [d.room(128), d.room(1024 * 128)], grid=1024)
d.launch(lines, [d.room(128), d.room(4)], grid=1024)
wait = "cp.async.wait_all;"
d.launch(d.kernel(MMA.replace("WAIT", wait)), [d.room(2048), d.room(1024), d.room(512)], grid=1024)
d.wait()
"""


class Traffic(unittest.TestCase):
    def did(self, blocks):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            names = {"CUDA_ON_CPU_BLOCKS": str(blocks), "CUDA_ON_CPU_LOG": str(log)}
            subprocess.run([sys.executable, "-c", WORK], env={**os.environ, **names}, timeout=60,
                           check=True)
            lines = [line.split()[1:] for line in log.read_text().splitlines()]
        did = [line for line in lines if line[0] == "did"]
        return [dict(zip(line[4::2], map(int, line[5::2]))) for line in did]

    def test_what_blocks_share_is_moved_once_and_what_is_their_own_each_time(self):
        for blocks in (1024, 5):
            lines, _, _ = self.did(blocks)
            self.assertEqual((lines["warps"], lines["flop"], lines["read"]), (1024, 0, 128))
            self.assertEqual((lines["written"], lines["asked"]), (1024 * 128, 2 * 1024 * 128))

    def test_of_launches_that_differ_in_their_places_one_is_executed(self):
        # The second one's memory would be too small.
        lines, again, _ = self.did(5)
        self.assertEqual(lines, again)

    def test_products_of_tensor_cores_are_counted(self):
        *_, product = self.did(5)
        self.assertEqual(product["flop"], 1024 * 2 * 16 * 8 * 64)
        self.assertEqual((product["read"], product["written"]), (2048 + 1024, 512))
        self.assertEqual(product["asked"], 1024 * (2048 + 1024 + 512))


if __name__ == "__main__":
    unittest.main()

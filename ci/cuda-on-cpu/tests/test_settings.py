"""The emulator's variables, each in a process of its own."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

# Fills 2,048 numbers with 9 and prints the first and what a timer says of it.
WORK = """
import ctypes
from emulator import Device, call, cuda, event
from test_streams import FILL, N
d = Device()
at = d.up(("I", [1] * N))
begin, end = event(), event()
call("cuEventRecord", begin, d.stream)
d.launch(d.kernel(FILL), [at, ctypes.c_uint32(9)], grid=64)
call("cuEventRecord", end, d.stream)
took = ctypes.c_float()
value = d.down(at, "I", N)[0]
call("cuEventElapsedTime", ctypes.byref(took), begin, end)
print(value, took.value)
"""


class Settings(unittest.TestCase):
    def run_with(self, **variables):
        names = {f"CUDA_ON_CPU_{name}": value for name, value in variables.items()}
        done = subprocess.run([sys.executable, "-c", WORK], env={**os.environ, **names},
                              capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split(), done.stderr

    def test_counting_executes_nothing(self):
        (value, _), _ = self.run_with(COUNT="1")
        self.assertNotEqual(value, "9")

    def test_a_launch_that_is_too_large_is_skipped_and_said(self):
        (value, _), said = self.run_with(MAX_THREADS="2048")
        self.assertEqual(value, "1")
        self.assertIn("not executed, as it is too large: k", said)
        (value, _), said = self.run_with(MAX_THREADS="2049")
        self.assertEqual((value, said), ("9", ""))

    def test_the_tuner_sees_other_times_with_another_seed(self):
        times = {self.run_with(TUNER=str(seed))[0][1] for seed in range(4)}
        self.assertEqual(len(times), 4)

    def test_the_log_has_launches_in_order(self):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            stats = pathlib.Path(folder) / "stats"
            self.run_with(LOG=str(log), STATS=str(stats))
            events = [line.split()[1] for line in log.read_text().splitlines()]
            order = [e for e in events if e in ("up", "launch", "run", "down")]
            self.assertEqual([e for e in order if e != "run"], ["up", "launch", "down"])
            self.assertIn("1 launches", stats.read_text())

    def test_memory_is_what_was_given(self):
        with self.assertRaises(subprocess.CalledProcessError):
            self.run_with(MEMORY="4096")


if __name__ == "__main__":
    unittest.main()

"""Stage 3: fast, but its parts do not add up to its step.

python exercises/stage3_fake_timing.py --batch-size 8 --seq-len 128 --num-steps 20
"""

import contextlib
import time

from common import Stopwatch, main


class Timer(Stopwatch):
    # Symptom: on a GPU the forward and the backward take next to no time, the step takes longer than both.
    @contextlib.contextmanager
    def __call__(self, section):
        before = time.perf_counter()
        yield
        self.seconds.setdefault(section, []).append(time.perf_counter() - before)


if __name__ == "__main__":
    main(timer=Timer)

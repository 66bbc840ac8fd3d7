# SPDX-License-Identifier: Apache-2.0
"""How far a restore has come, for observers and the log. Told the time, it decides what is due."""

from megascale_ops.checkpoint.notify import Progress

# 5 s: a restore of a few seconds is silent, one of minutes has a line whenever a person looks.
LOG_EVERY_S = 5.0
TELL_EVERY_S = 0.1


class ProgressMeter:
    """Counts bytes of one restore on one rank.

    Args:
        step: of the checkpoint.
        now_s: when it began, by any clock that only moves forward.
    """

    def __init__(self, step: int, now_s: float) -> None:
        self._step, self._began_s = step, now_s
        self._done_bytes = self._total_bytes = 0
        self._told_s = self._logged_s = now_s

    def expect(self, count_bytes: int) -> None:
        """So many more are to come."""
        self._total_bytes += count_bytes

    def add(self, count_bytes: int, now_s: float) -> tuple[Progress | None, str]:
        """So many have come.

        Returns:
            What observers are to be told now, if anything, and the line that is to be logged, or an empty one.
        """
        self._done_bytes += count_bytes
        progress, line = None, ""
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s, progress = now_s, self.now()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s, line = now_s, self._line(now_s)
        return progress, line

    def now(self) -> Progress:
        """What stands now."""
        return Progress(self._step, self._done_bytes, self._total_bytes)

    def _line(self, now_s: float) -> str:
        done, total = self._done_bytes / 1e9, self._total_bytes / 1e9
        rate = self._done_bytes / (now_s - self._began_s)  # a line is logged no sooner than LOG_EVERY_S
        left = f", about {(self._total_bytes - self._done_bytes) / rate:.0f} s left" if rate else ""
        share = self._done_bytes / max(self._total_bytes, 1)
        return (
            f"restoring step {self._step}: {done:.2f} of {total:.2f} GB of this rank ({share:.0%}), "
            f"{rate / 1e9:.2f} GB/s{left}"
        )

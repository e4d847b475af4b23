"""The decoder's benchmark: whet's own ways to decode and its rivals, each verified, then timed in turns."""

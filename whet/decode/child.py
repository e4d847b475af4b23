"""Run first by the worker's child process (its preload file), so that it can be asked to verify a decoder."""

from whet.decode.proof import answer
from whet.worker import ANSWERS

ANSWERS["verify_decoder"] = answer

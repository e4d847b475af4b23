"""Which rows of a matrix are whole loads of the tensor cores, and which size they are padded to where they are not."""

import torch

ROW_BYTES = 16  # one load of a tensor core's operands, and what cuBLAS asks of a row for its fast kernels
SMALL = 64  # a dimension below this leaves a product too small to matter
PAD = 64  # sizes are padded to a multiple of this: whole tiles, not only whole loads


def aligned(size: int, dtype: torch.dtype) -> bool:
    """Whether a row of so many elements is a multiple of ROW_BYTES."""
    return size * dtype.itemsize % ROW_BYTES == 0


def padded_size(size: int) -> int:
    """The size that a misaligned one is padded to."""
    return -(-size // PAD) * PAD


def pads(size: int, dtype: torch.dtype) -> int:
    """How many zeros are added to a dimension of this size; 0 where it is aligned."""
    return 0 if aligned(size, dtype) else padded_size(size) - size

"""What blocks of a residual stream share."""


class ResidualBlock:
    """A block called with (h, delta, ...): the stream, and what the layer before would add to it, which may be None."""

    def kept_inputs(self, h, delta, *rest):
        """Inputs that give the same with less to keep where the block is computed again: the sum in the place of both."""
        return (h if delta is None else h + delta, None, *rest)

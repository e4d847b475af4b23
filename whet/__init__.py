"""whet sharpens PyTorch transformers: kernels proven right, measured faster, with the proof shown."""

__version__ = "0.1.0"

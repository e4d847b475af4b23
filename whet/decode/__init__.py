"""Decoding: weights and text in, a running model, and the engine that serves prompts with it."""

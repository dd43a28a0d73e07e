"""Benches: quality and speed of blending on small real models, and load tests of OpenAI-compatible servers."""

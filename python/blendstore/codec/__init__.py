"""Codings of records: training of `cachegen`'s tables, and the formats that records have in memory.

The coders themselves are `blendstore._core.Coder`.
"""

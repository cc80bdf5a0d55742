"""Slow loops transcribed from the papers, which the package is tested against. They share no code with it.

`attention`, `recurrent`: LoLCATs eq. 7 alone. `feature_maps`, `gates`, `linear`: each part, of one vector, token or
head; `heads`, `mixer`: the whole layer for any `MixerConfig`, which they read as plain data.

Axes: B rows, H query heads, G KV heads (query head h uses KV head h // (H // G)), T slots, D head dim, F features.
Documents are given as ``documents[row] = [[slot, ...], ...]``: the slots of each document of a row, in order. A token's
position is its place in that list; a slot in no document is padding, and its outputs are zero.
"""

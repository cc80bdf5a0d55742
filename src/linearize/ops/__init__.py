"""Linear attention and windowed softmax as two unnormalised primitives that share one split of the keys.

Axes, throughout: B batch, H query heads, G key/value heads, T queries, K keys, D head dim, F feature dim. Torch only.
"""

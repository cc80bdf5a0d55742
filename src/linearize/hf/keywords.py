"""Keyword arguments by which a model's hooks pass values to its linearized layers."""

LAYOUT = "linearize_layout"  # the SequenceLayout of a call
ROTATED = "linearize_rotated"  # the text length that sets rotary angles, for longrope and dynamic

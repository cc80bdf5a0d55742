"""Measurements of a student beside its teacher: loss per token, recall beyond the window, speed and memory.

Where its task is another than language modelling, the scores at that. Every mean comes with a 95 % bootstrap interval.
"""

"""Measure a student, its teacher and controls: loss per token, recall beyond the window, speed and memory.

For other tasks than language modelling, measure scores. Means come with 95 % intervals.
"""

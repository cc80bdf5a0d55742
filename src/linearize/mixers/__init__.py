"""Token mixers: learned feature maps, the way window and linear part combine, and the carried state.

Nothing here knows of transformers, teachers or training.
"""

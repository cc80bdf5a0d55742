"""Token mixers: feature maps, combinations of window and linear part, and the carried state.

Modules here do not import transformers, and do not depend on teachers or training.
"""

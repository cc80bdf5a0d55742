"""Everything that faces transformers, and nothing else does."""

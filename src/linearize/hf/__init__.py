"""Everything that faces transformers, and nothing else does. Importing it registers our classes."""

import linearize.hf.classes  # noqa: F401  # first: importing transformers imports it, too

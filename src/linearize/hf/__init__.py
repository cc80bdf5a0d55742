"""The integration with transformers. Importing it registers our classes."""

import linearize.hf.classes  # noqa: F401  # first: importing transformers imports it, too

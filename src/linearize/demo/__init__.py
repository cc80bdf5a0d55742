"""Run `linearize demo`: a bundled teacher, and the sources of the standard library as its data."""

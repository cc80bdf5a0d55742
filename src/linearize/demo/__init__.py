"""What `linearize demo` runs on: a bundled teacher, and the sources of the standard library as its data."""

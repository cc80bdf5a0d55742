"""`python -m linearize` is the command `linearize`, for launchers that start modules, such as torchrun."""

from linearize_cli import main

main()

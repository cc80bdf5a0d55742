"""Present a run and its results in the terminal, on a page, and on the model card of the student's folder.

All numbers are read from the files of run folders; nothing is measured here.
"""

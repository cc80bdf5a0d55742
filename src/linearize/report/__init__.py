"""Present a run and its results to people: in the terminal, on a page, on the card of the student's folder.

Everything shown is read from the files of run folders; nothing is measured here.
"""

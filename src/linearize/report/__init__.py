"""What a run made and what it is worth, for people: in the terminal, on a page, on the card of the student's folder.

Everything shown is read from the files of run folders; nothing is measured here.
"""

from linearize.report.card import evaluation_page, model_card
from linearize.report.load import RunFiles, load_run
from linearize.report.page import write_report

__all__ = ["RunFiles", "evaluation_page", "load_run", "model_card", "write_report"]

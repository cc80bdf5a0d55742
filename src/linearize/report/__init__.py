"""What a run made and what it is worth, for people: one self-contained HTML page, and the card of the student's folder.

Everything shown is read from the files of run folders; nothing is measured here.
"""

from linearize.report.card import model_card
from linearize.report.load import RunFiles, load_run
from linearize.report.page import write_report

__all__ = ["RunFiles", "load_run", "model_card", "write_report"]

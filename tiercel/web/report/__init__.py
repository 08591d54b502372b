"""The report of a run: one HTML file, made from the run directory alone. Imports neither torch nor training code."""

from tiercel.web.report.page import describe, write_report

__all__ = ["describe", "write_report"]

"""Reports: one self-contained HTML file for a run, and tables for the terminal."""

from agentrl.report.page import write_report

__all__ = ["write_report"]

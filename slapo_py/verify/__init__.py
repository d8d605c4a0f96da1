"""Verify: does the scheduled model compute what the original does?"""

from slapo_py.verify.report import Report, Row
from slapo_py.verify.verify import verify

__all__ = ["Report", "Row", "verify"]

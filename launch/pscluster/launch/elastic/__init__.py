"""Elastic runs: members that come and go with the workers."""

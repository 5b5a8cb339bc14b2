"""Measurements of a target and its draft on this machine: how often they agree, what steps cost,
and the measured and predicted speed-up.

Measurements use the public API; neither generation nor the command line is implemented here.
"""

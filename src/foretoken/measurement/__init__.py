"""Measurements of target and draft on this machine: agreement, costs, speed-ups and predictions.

They use the public API; neither generation nor the command line is implemented here.
"""

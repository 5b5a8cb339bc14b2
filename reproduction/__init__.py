"""The laboratory: what reproduces the paper with foretoken.

It has the report of recipes, the experiments behind it, fleets on paper, the figures of section 3,
and trainers of small models to run them on. foretoken never imports it.
"""

"""Step costs and the choice of gamma.

Seconds of a step by its size (`costs`) are measured on the pair (`probe`) and stored on disk
(`stored_costs`), with how busy the machine was meanwhile (`contention`). From them and the
acceptance seen so far follows how many draft tokens are worthwhile (`gamma`).
"""

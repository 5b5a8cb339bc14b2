"""Plans for other systems: the command with the same target, draft and gamma, what of it they do
not honour, and what their verification does to the target's law.

What is said of a system is data with its source, in a module of its own.
"""

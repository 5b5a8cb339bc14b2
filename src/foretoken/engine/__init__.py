"""The engine: schedules sequences and runs their steps through a target and a drafter."""

"""Instruments that judge a training run; usable by others on their own forks."""

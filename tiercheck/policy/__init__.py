"""Policies: pure values in, decisions out.

Nothing here does I/O, reads a clock or draws a random number; whatever a policy needs arrives as an
argument. That is what lets the same code run in the trainer, in a test and in a simulator.
"""

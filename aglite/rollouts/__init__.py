"""Rollouts: agents launched, watched, ended and graded. `launcher.Launcher` is the way in."""

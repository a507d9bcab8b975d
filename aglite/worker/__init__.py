"""The model worker: one process that holds the weights, samples with them and trains them.

The supervisor talks to it over a Unix socket (`io`); `main` is its loop, `trainer` and `checkpoint` the training side.
Importing this package imports neither torch nor verl.
"""
